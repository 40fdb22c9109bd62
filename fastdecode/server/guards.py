"""What a request passes before its route: the API key, and HEAD, which is a GET without its body."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdecode.server.errors import ApiError
from fastdecode.server.live import PAGE
from fastdecode.server.streams import error_response

HEALTH = "/health"


class KeyGuard:
    """Answers 401 to what does not bring the API key, but for the health check and the live page, which is empty until
    its stream, which needs the key, fills it."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected is not None and scope["path"] not in (HEALTH, PAGE):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").strip().partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._expected):
                refusal = ApiError(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`")
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
