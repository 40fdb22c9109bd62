"""A connection that cannot be held open for nothing: uvicorn's, with limits on what a client may take its time for."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fastdecode.server.answers import error_body

MOST_HEADER_BYTES = 64 << 10


class LimitedProtocol(HttpToolsProtocol):
    """Closes where a request's header, or the client's reading of an answer, takes more than ``timeout_seconds``.

    Bodies are the routes' own to time: they know how long one may be.
    """

    timeout_seconds: ClassVar[float] = 30.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes: int | None = 0
        self._num_received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self._header_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_received = len(data)
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if (self._header_bytes or 0) > MOST_HEADER_BYTES:
            self._refuse(431, f"the header is longer than {MOST_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._header_bytes is None:
            self._header_bytes = self._num_received
        self._arm(self._header_is_late)

    def on_headers_complete(self) -> None:
        """Its header is here."""
        self._disarm()
        self._header_bytes = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Answered; what may still come of the body must not take for ever."""
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._arm(self.transport.close)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._arm(self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        self._disarm()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered as everything else."""
        self._refuse(400, msg)

    def _header_is_late(self) -> None:
        self._refuse(408, f"the header did not arrive within {self.timeout_seconds:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error_body(message, code=status))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _arm(self, function: Any) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(self.timeout_seconds, function)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
