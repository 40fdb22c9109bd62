"""Middleware that checks a request before its route runs.

It handles the API key, HEAD requests (a GET without a body), and web pages of other origins, which need permission.
"""

from __future__ import annotations

import hmac
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdecode.api.settings import is_loopback
from fastdecode.core.errors import ConfigError
from fastdecode.server.errors import ApiError
from fastdecode.server.live import PAGE
from fastdecode.server.messages_errors import is_messages, message_error_response
from fastdecode.server.server_settings import ServerSettings
from fastdecode.server.streams import error_response

HEALTH = "/health"
ANY = ("*",)
REQUEST_ID = b"x-request-id"


class KeyGuard:
    """Answers 401 without the API key, except for the health check and the live page.

    The live page is empty until its stream fills it, and the stream needs the key.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        is_open = scope["type"] != "http" or not self._expected or path in (HEALTH, PAGE)
        if is_open or self._is_key(_key_in(dict(scope["headers"]))):
            await self._app(scope, receive, send)
            return
        wanted = "send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
        refusal = ApiError(401, f"the API key is missing or wrong: {wanted}")
        await (message_error_response if is_messages(scope) else error_response)(refusal)(scope, receive, send)

    def _is_key(self, given: bytes) -> bool:
        """Return whether ``given`` is one of the API keys. The time taken does not reveal which one."""
        return sum(hmac.compare_digest(given, each) for each in self._expected) > 0


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key in a request's OpenAI or Anthropic header; b"" if there is none."""
    scheme, _, given = headers.get(b"authorization", b"").strip().partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


class RequestIds:
    """Gives every answer the X-Request-Id of its request, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(REQUEST_ID) or uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            headers = [*message.get("headers", ())]
            if message["type"] == "http.response.start" and REQUEST_ID not in dict(headers):
                message = {**message, "headers": [*headers, (REQUEST_ID, given)]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeadAsGet:
    """Answers HEAD with the header of the answer to GET. A stream ends after its header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        ended = False

        async def send_header(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not ended:
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        told: dict[str, Any] = {**scope, "method": "GET"}
        await self._app(told, receive, send_header)


def with_cors(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Return ``app`` with the cross-origin rules of ``settings``. Raise ConfigError for malformed lists.

    Without ``allowed_origins``, any web page may use a server that needs no key and listens on loopback only.
    """
    is_open = is_loopback(settings.host) and not settings.api_keys
    origins = _read("allowed_origins", settings.allowed_origins, ANY if is_open else ())
    methods = _read("allowed_methods", settings.allowed_methods, ANY)
    headers = _read("allowed_headers", settings.allowed_headers, ANY)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        origins,
        methods,
        headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=[REQUEST_ID.decode()],
    )


def _read(name: str, given: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """Return the values of flag ``name``, given as several words, with commas, or as a JSON list as in vLLM."""
    if not given:
        return tuple(default)
    found: list[str] = []
    for each in given:
        if not each.lstrip().startswith("["):
            found += filter(None, map(str.strip, each.split(",")))
            continue
        try:
            read = json.loads(each)
        except ValueError:
            read = None
        if not isinstance(read, list) or not all(isinstance(one, str) for one in read):
            raise ConfigError(f"{name}: {each!r:.80} is no JSON list of texts, such as '[\"https://a.example\"]'")
        found += read
    return tuple(found)
