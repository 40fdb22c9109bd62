"""What a request passes before its route: the API key, and HEAD, which is a GET without its body."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdecode.server.errors import ApiError
from fastdecode.server.live import PAGE
from fastdecode.server.streams import error_response

HEALTH = "/health"
REQUEST_ID = b"x-request-id"


class KeyGuard:
    """Answers 401 to what does not bring the API key, but for the health check and the live page, which is empty until
    its stream, which needs the key, fills it."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and self._expected and path not in (HEALTH, PAGE):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").strip().partition(b" ")
            if scheme.lower() != b"bearer" or not self._is_key(given.strip()):
                refusal = ApiError(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`")
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_key(self, given: bytes) -> bool:
        """Return whether it is one of the keys, in a time that says nothing of which."""
        return sum(hmac.compare_digest(given, each) for each in self._expected) > 0


class RequestIds:
    """Gives every answer the X-Request-Id of its request, or one of its own."""

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
    """Answers HEAD with the header of what GET would be answered; a stream ends with its header."""

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
