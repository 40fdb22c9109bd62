"""uvicorn's connection with time limits, so that no idle client can hold it open."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastdecode.server.answers import error_body

MOST_HEADER_BYTES = 64 << 10


class LimitedProtocol(HttpToolsProtocol):
    """A connection that closes if a header, or the client's reading of an answer, exceeds ``timeout_seconds``.

    Routes limit the time of request bodies, whose sizes they know. A header, with trailers of a chunked body, has at
    most MOST_HEADER_BYTES. Offers of another protocol (``Upgrade``) are ignored, as RFC 9110 allows.
    """

    timeout_seconds: ClassVar[float] = 30.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes: int | None = 0
        self._field_bytes = 0
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
        self._unset_keepalive_if_required()
        self._parse(data)
        if (self._header_bytes or 0) > MOST_HEADER_BYTES:
            self._refuse_header()

    def _parse(self, data: bytes) -> None:
        """Pass ``data``, bytes from the client, to the HTTP parser.

        At an offer of another protocol the parser stops; the same request is then parsed again without the offer.
        """
        while data and not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    self._refuse(405, "CONNECT: this server is no proxy")
                    return
                head = _head(method, self.url, self.parser.get_http_version(), self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                data = head + data[offer.args[0] :]
            except httptools.HttpParserError:
                self._refuse(400, "this is no HTTP request that can be read")
                return

    def on_message_begin(self) -> None:
        """Start counting the header bytes of a new request. The HTTP parser calls this."""
        super().on_message_begin()
        self._field_bytes = 0
        if self._header_bytes is None:
            self._header_bytes = self._num_received
        self._arm(self._header_is_late)

    def on_url(self, url: bytes) -> None:
        """Count ``url``, a part of the path, as header bytes."""
        self._count_field(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count ``name`` and ``value``, one field of the header or the trailers, as header bytes."""
        self._count_field(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time limit of the header, which is complete."""
        self._disarm()
        self._header_bytes = None
        if self.parser.should_upgrade() or self.transport.is_closing():
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _AnswerToHttp10(self.cycle).send  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Pass ``body``, a part of the request's body, to uvicorn, unless the connection is closing."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Mark the request as complete, unless it will be parsed again or the connection closes."""
        if not self.parser.should_upgrade() and not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time in which the client may send the rest of its body after the answer."""
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._arm(self.transport.close)

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not read its answer."""
        super().pause_writing()
        self._arm(self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the time limit that ``pause_writing`` started, since the client reads again."""
        self._disarm()
        super().resume_writing()

    def _count_field(self, *parts: bytes) -> None:
        self._field_bytes += sum(map(len, parts)) + 4  # 4: a colon, a space, and 2 bytes at the line's end
        if self._field_bytes > MOST_HEADER_BYTES:
            self._refuse_header()

    def _refuse_header(self) -> None:
        self._refuse(431, f"the header is longer than {MOST_HEADER_BYTES} bytes")

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


class _AnswerToHttp10:
    """Sends one answer to an HTTP/1.0 client, which knows no chunks: closing the connection ends a stream."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._is_open = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_open = b"content-length" not in names
            self._cycle.chunked_encoding = False if self._is_open else None
        elif self._is_open:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def _head(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a request's header without its offer of another protocol."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    lines += [b"%s: %s" % field for field in headers if field[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"\r\n"])
