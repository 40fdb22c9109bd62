"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from fastdecode.server.errors import api_error
from fastdecode.server.messages_request import MESSAGES


def is_messages(scope: Scope) -> bool:
    """Return whether the path of the request's ASGI ``scope`` belongs to Anthropic's API."""
    path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def message_error(status: int, message: str, answer_id: str | None = None) -> dict[str, Any]:
    """Return an error object in Anthropic's shape. It is the body of an answer, or the event of a failed stream."""
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": " ".join(message.split())}
    return {"type": "error", "error": told, "request_id": answer_id}


def message_error_response(error: Exception, answer_id: str | None = None) -> Response:
    """Return the HTTP response that tells ``error`` to a client of Anthropic's API."""
    found = api_error(error)
    body = message_error(found.status, str(found), answer_id)
    return Response(msgspec.json.encode(body), found.status, found.headers, "application/json")
