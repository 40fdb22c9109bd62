"""HTTP as clients use it: offers of other protocols, HTTP/1.0, HEAD, long headers, pages of other origins."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.parse
from typing import Any

import pytest
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import MODEL, RunningServer
from starlette.types import Message

from fastdecode.core.errors import ConfigError
from fastdecode.server.guards import KeyGuard, with_cors
from fastdecode.server.server_settings import ServerSettings

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
BODY = json.dumps({"prompt": "def f(", "max_tokens": 2, "temperature": 0}).encode()
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKS = (
    b"transfer-encoding: chunked\r\n\r\n5\r\n"
    + BODY[:5]
    + b"\r\n%x\r\n" % (len(BODY) - 5)
    + BODY[5:]
    + b"\r\n0\r\n\r\n"
)
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def ask(server: RunningServer, *pieces: bytes) -> bytes:
    """Return all that comes back until the server closes."""
    address = urllib.parse.urlsplit(server.url)
    found = b""
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        while part := connection.recv(1 << 16):
            found += part
    return found


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("body", [LENGTH + BODY, CHUNKS], ids=["length", "chunks"])
def test_an_offer_of_another_protocol_is_ignored(chat_server: RunningServer, body: bytes, size: int) -> None:
    """The offer may come in any pieces, and the connection goes on with further requests."""
    found = ask(chat_server, *cut(POST + OFFER + body + POST + OFFER + body + LAST, size))
    assert found.count(b"HTTP/1.1 200 OK") == 3 and found.count(b'"text_completion"') == 2 and b" 101 " not in found


@pytest.mark.slow
def test_what_is_offered_or_wanted_otherwise(chat_server: RunningServer) -> None:
    socket_offer = b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"
    assert b" 200 OK" in ask(chat_server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + socket_offer + b"\r\n" + LAST)
    expecting = ask(chat_server, POST + OFFER + b"expect: 100-continue\r\n" + LENGTH, BODY + LAST)
    assert expecting.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert b" 405 " in ask(chat_server, b"CONNECT a.example:443 HTTP/1.1\r\nhost: x\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n", OFFER])
def test_a_stream_to_http_1_0_has_no_chunks(chat_server: RunningServer, more: bytes) -> None:
    """The stream ends with the connection, and an answer of known length has its length."""
    streamed = json.dumps({"prompt": "def f(", "max_tokens": 3, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\n" + more
    header, _, text = ask(chat_server, head + b"content-length: %d\r\n\r\n" % len(streamed) + streamed).partition(
        b"\r\n\r\n"
    )
    assert b"transfer-encoding" not in header and b"connection: close" in header
    lines = text.split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""] and all(json.loads(line[6:])["choices"] for line in lines[:-2])
    header, _, text = ask(chat_server, head + LENGTH + BODY).partition(b"\r\n\r\n")
    assert f"content-length: {len(text)}".encode() in header and json.loads(text)["choices"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 11_000 + b"\r\n",
        b"GET /health?" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\na: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
    ids=["field", "fields", "path", "trailer"],
)
def test_a_header_over_64_kib_is_refused(chat_server: RunningServer, request_: bytes) -> None:
    """A header over 64 KiB is refused though it is complete, and a shorter one is not."""
    found = ask(chat_server, request_)
    assert found.startswith(b"HTTP/1.1 431 ") and json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == 431
    assert b" 200 OK" in ask(chat_server, LAST[:-2] + b"a: " + b"y" * 60_000 + b"\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/health", "/v1/models", f"/v1/models/{MODEL}", "/", "/live", "/nothing"])
def test_head_is_get_without_its_body(chat_server: RunningServer, path: str) -> None:
    head = f" {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    told = ask(chat_server, b"HEAD" + head)
    assert told.endswith(b"\r\n\r\n") and told.count(b"\r\n\r\n") == 1
    if path != "/live":
        header = ask(chat_server, b"GET" + head).partition(b"\r\n\r\n")[0]
        assert {line for line in told.split(b"\r\n") if line[:4] != b"date"} - {b""} == {
            line for line in header.split(b"\r\n") if line[:4] != b"date"
        }


@pytest.mark.slow
def test_pages_of_other_origins_may_ask_a_server_of_this_machine(chat_server: RunningServer) -> None:
    asked = (
        b"origin: https://a.example\r\naccess-control-request-method: POST\r\naccess-control-request-headers: x-a\r\n"
    )
    found = ask(
        chat_server, b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + asked + b"\r\n"
    )
    assert found.startswith(b"HTTP/1.1 200 ")
    assert b"access-control-allow-origin: *" in found and b"access-control-allow-headers: x-a" in found
    head = b"origin: https://a.example\r\nconnection: close\r\n"
    for request_ in (POST + head + LENGTH + BODY, b"GET /nothing HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n"):
        assert b"access-control-allow-origin: *" in ask(chat_server, request_)


async def nothing(*_: Any) -> None:
    """Answer nothing."""


def is_open(**settings: Any) -> bool:
    return with_cors(nothing, ServerSettings(**settings)) is not nothing


def test_who_may_ask_from_elsewhere() -> None:
    """Pages of any origin may use a server that only this machine reaches and that has no key.

    Other servers allow none unless the user says so.
    """
    assert is_open() and is_open(host="::1") and is_open(host="localhost")
    assert not is_open(host="0.0.0.0") and not is_open(api_key="secret") and not is_open(allowed_origins=["[]"])
    assert is_open(host="0.0.0.0", allowed_origins=["https://a.example"])
    for told in (["https://a.example", "https://b.example"], ['["https://a.example", "https://b.example"]']):
        found: Any = with_cors(nothing, ServerSettings(allowed_origins=told, allowed_methods=["GET,POST"]))
        assert found.is_allowed_origin("https://b.example") and not found.is_allowed_origin("https://c.example")
        assert list(found.allow_methods) == ["GET", "POST"]
    for wrong in ("[3]", '["a"', "[x]"):
        with pytest.raises(ConfigError, match=r"allowed_origins: .* is no JSON list of texts"):
            is_open(allowed_origins=[wrong])


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (b"Bearer KEY", 200), (b"bearer KEY", 200), (b"BEARER  KEY ", 200), (b"Bearer KEY2", 401), (b"KEY", 401),
        (b"Basic KEY", 401), (b"Bearer", 401), (b"", 401),
    ],
)  # fmt: skip
def test_the_scheme_of_a_key_may_be_written_in_any_case(given: bytes, status: int) -> None:
    sent: list[Message] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"authorization", given)]}
    asyncio.run(KeyGuard(answer, ["OTHER", "KEY"])(scope, nothing, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == status
