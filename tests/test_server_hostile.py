"""Hostile or mistaken bodies and clients get an error in OpenAI's form, and disturb no other client."""

from __future__ import annotations

import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.examples import examples
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import CHAT_TEMPLATE, RunningServer, serving, total, wait_until_idle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.server.foreign_fields import REFUSED
from fastdecode.server.protocol import CompletionRequest

pytestmark = pytest.mark.slow

MOST_BYTES = 100_000
CUT_OFF_SECONDS = 2
NOT_TAKEN = sorted(REFUSED.keys() - set(CompletionRequest.__struct_fields__))

LONG_GRAMMAR = "start: " + " | ".join(f'"word{number}"' for number in range(2500))
"""More alternatives than llguidance follows, which it says only at the first token."""

IDLE = "idle: returning free memory"

POST = b"POST /v1/completions HTTP/1.1\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    limits = [str(DEMO_MODEL), "--request-timeout", str(CUT_OFF_SECONDS), "--max-request-bytes", str(MOST_BYTES)]
    limits += ["--max-model-len", "64", "--disable-log-requests", "--swap-space", "4", "--log-level", "info"]
    with serving(tmp_path_factory.mktemp("hostile"), *limits, "--chat-template", CHAT_TEMPLATE) as running:
        yield running
        assert running.request("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        wait_until_idle(running)
        log = running.log.read_text()
        assert "Traceback" not in log and "word2499" not in log


def completion(**body: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 2, **body}).encode()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 40_000, "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b"[]", "body must be an object"),
        (b"{}", "prompt is missing"),
        (completion(prompt={}), "prompt: expected"),
        (completion(prompt=[]), "prompt is empty"),
        (completion(prompt=[[]]), "prompt is empty"),
        (completion(prompt=[[[]]]), "whole numbers"),
        (completion(prompt=[1, "a"]), "whole numbers"),
        (completion(prompt=[10**30]), "outside the vocabulary"),
        (completion(prompt=[-1]), "outside the vocabulary"),
        (completion(prompt=["x"] * 17_000), "more than 16384 samples"),
        (completion(n=10**6), "n must be an integer from 1 to 16384"),
        (completion(n=10**40), "n must be an integer"),
        (completion(n=8000, prompt=["x"] * 8000), "more than 16384 samples"),
        (completion(max_tokens=0), "max_tokens must be"),
        (completion(max_tokens=True), "max_tokens: expected"),
        (completion(temperature="hot"), "temperature: expected"),
        (completion(temperature=1e300), "temperature must be"),
        (completion(seed=2**70), "seed must be"),
        (completion(stop=[""]), "stop must be"),
        (completion(logit_bias={"x": 1}), "logit_bias must be"),
        (completion(logit_bias={"99999": 1}), "logit_bias must hold token ids"),
        (completion(stream_options={"include_usage": True}), "stream_options belong to a stream"),
        (completion(echo=True, logprobs=-5), "logprobs must be"),
        (completion(response_format={"type": "poem"}), "response_format.type"),
        (completion(max_tokens=63), "max_tokens is too large: 63; max_model_len is 64 tokens, and the prompt has 2"),
        (completion(**{f"k{number}": 1 for number in range(1100)}), "the body has 1102 fields: it may have 1024"),
        (completion(stop=["s"] * 1025), "stop: expected `array` of length <= 1024"),
        (completion(bad_words=["s"] * 1025), "bad_words: expected `array` of length <= 1024"),
        (completion(guided_regex="a", structured_outputs={"regex": "a"}), "exclude each other"),
        (completion(allowed_token_ids=[99999]), "allowed_token_ids must hold token ids"),
        *((completion(**{name: 0 if name != "priority" else 1}), f"{name} is not supported: ") for name in NOT_TAKEN),
        (completion(structured_outputs={"grammar": LONG_GRAMMAR}), "cannot be followed: Parser Error: Current row has"),
    ],
)
def test_a_bad_body_is_answered_with_what_is_wrong(server: RunningServer, body: bytes, message: str) -> None:
    status, answer = server.request("/v1/completions", body)
    assert status == 400 and message in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"} and "\n" not in answer["error"]["message"]


def test_what_a_refused_body_took_goes_back(server: RunningServer) -> None:
    for body in (completion(), b"[" * (MOST_BYTES - 1)):
        before = server.log.read_text().count(IDLE)
        server.request("/v1/completions", body)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while server.log.read_text().count(IDLE) == before:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(
    "body",
    [
        completion(max_tokens=10**9, stop="e"),
        completion(max_tokens=10**40, ignore_eos=True),
        completion(top_k=10**40),
        completion(logprobs=10**40),
        completion(min_tokens=2, stop_token_ids=[1, 2, 3]),
        completion(logit_bias={str(token): -100 for token in range(200)}),
        completion(unheard_of={"a": ["b\r\n"]}),
        completion(best_of=2, n=2, suffix="", functions=[], priority=0, prompt_logprobs=None, modalities=["text"]),
    ],
)
def test_large_values_are_no_harm(server: RunningServer, body: bytes) -> None:
    assert server.request("/v1/completions", body)[0] in (200, 400)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages"),
        ({"messages": "hi"}, "messages: expected"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"content": "hi"}]}, "messages must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": [{"role": "user", "content": "hi"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2}, "logprobs must be true"),
        ({"messages": [{"role": "user", "content": "hi"}], "echo": True}, "not supported: only /v1/completions"),
        (
            {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 60},
            "max_completion_tokens is too",
        ),
    ],
)
def test_a_bad_chat_is_answered_with_what_is_wrong(server: RunningServer, body: Any, message: str) -> None:
    status, answer = server.request("/v1/chat/completions", body)
    assert status == 400 and message in answer["error"]["message"], answer


def test_long_bodies_and_unknown_routes(server: RunningServer) -> None:
    """Long bodies are refused also where the length is not given beforehand."""
    status, answer = server.request("/v1/completions", completion(prompt="x" * MOST_BYTES))
    assert status == 413 and "longer than" in answer["error"]["message"]
    chunks = b"".join(b"4000\r\n" + b"x" * 0x4000 + b"\r\n" for _ in range(8))
    head = b"host: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b" 413 " in raw(server, POST + head + chunks).split(b"\r\n")[0]
    for path, method in (("/nothing", 404), ("/v1/models/nothing", 404)):
        status, answer = server.request(path)
        assert status == method and answer["error"]["message"]
    status, answer = server.request("/tokenize")
    assert status == 405 and answer["error"]["message"]


def connect(server: RunningServer) -> socket.socket:
    address = urllib.parse.urlsplit(server.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=PATIENCE_SECONDS)


def raw(server: RunningServer, data: bytes) -> bytes:
    """Return what is answered to ``data`` until the server closes."""
    with connect(server) as connection:
        connection.sendall(data)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass  # The server closes while we still send.
    return found


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, 431),
    ],
)
def test_what_is_no_http_is_refused(server: RunningServer, data: bytes, status: int) -> None:
    answer = raw(server, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status


@pytest.mark.parametrize(
    "head",
    [b"", POST + b"host: x\r\n", POST + b"content-length: 99\r\n\r\n"],
    ids=["silence", "header", "body"],
)
def test_a_client_that_takes_its_time_is_cut_off(server: RunningServer, head: bytes) -> None:
    """The client sends a byte now and then, and no other client waits for it."""
    with connect(server) as connection:
        connection.sendall(head)
        start = time.monotonic()
        for _ in range(4):
            time.sleep(0.1)
            connection.sendall(b"a" if head else b"")
        assert server.request("/health")[0] == 200
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and time.monotonic() - start > 0.8 * CUT_OFF_SECONDS
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408


def test_a_client_that_does_not_read_is_cut_off(server: RunningServer) -> None:
    """The client's sequences are dropped with it."""
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = completion(stream=True, n=16, max_tokens=60, ignore_eos=True, logprobs=200)
        connection.sendall(POST + b"host: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not total(server, "fastdecode:num_api_requests"):
            assert time.monotonic() < deadline
        while total(server, "fastdecode:num_api_requests"):
            assert time.monotonic() < deadline
            time.sleep(0.1)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
LIKELY = {
    "n": st.integers(1, 3), "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "top_k": st.integers(-1, 300),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3), "seed": st.integers(0, 99),
    "stream": st.booleans(), "logprobs": st.integers(0, 5) | st.booleans(), "min_tokens": st.integers(0, 3),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "structured_outputs": st.fixed_dictionaries({"regex": st.text(max_size=6)}),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3), "echo": st.booleans(),
    "top_logprobs": st.integers(0, 3), "tools": st.lists(ANYTHING, max_size=1), "stream_options": ANYTHING,
    "response_format": ANYTHING,
}  # fmt: skip


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    body=st.fixed_dictionaries({}, optional={name: each | ANYTHING for name, each in LIKELY.items()}),
    text=st.text(max_size=8),
)
def test_no_body_makes_the_server_fail(server: RunningServer, path: str, body: dict[str, Any], text: str) -> None:
    """Some fields are correct, and some are anything."""
    asked = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **body}
    status, answer = server.request(path, asked)
    assert status in (200, 400), answer
    assert status == 200 or answer["error"]["message"]
