"""Errors that answer an API request."""

from __future__ import annotations

from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError
from fastdecode.server.answers import INVALID

RETRY_SECONDS = 1
"""Seconds after which a refused client may retry."""


class ApiError(Exception):
    """A request that is answered with an HTTP status of 400 or more."""

    def __init__(self, status: int, message: str, kind: str = INVALID, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    @property
    def headers(self) -> dict[str, str]:
        """The Retry-After header, if a retry may help."""
        return {"retry-after": str(RETRY_SECONDS)} if self.status == 503 else {}


def api_error(error: Exception) -> ApiError:
    """Return ``error`` as an ApiError for the client. Unexpected errors become a 500 that reveals no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | ConfigError):
        return ApiError(400, str(error))
    message = str(error) if isinstance(error, FastDecodeError) else "the server made a mistake"
    return ApiError(503, message, "server_error")
