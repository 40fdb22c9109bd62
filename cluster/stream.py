"""A channel over a connected Unix socket: between a process and the R-workers that it starts itself."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any

from fastdecode.cluster.frames import HEADER, decode
from fastdecode.errors import FrameError


class StreamChannel:
    """``Channel`` over one end of a socket pair: both ends know each other, and nobody else can speak."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._left: list[int] = []

    def send(self, parts: Sequence[Any]) -> None:
        """See ``Channel.send``."""
        try:
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise ConnectionError(f"the control socket is closed: {error.strerror}") from None

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. A stream cannot go on after a bad header, so that ends the connection."""
        while self._left:
            self.read_into(bytearray(self._left[0]))
        if not self._poll.poll(timeout_seconds * 1000):
            return None
        header = bytearray(HEADER.size)
        self._fill(header)
        try:
            self._left = [length for length in decode(bytes(header)).lengths if length]
        except FrameError as error:
            raise ConnectionError(str(error)) from None
        return bytes(header)

    def read_into(self, buffer: Any) -> None:
        """See ``Channel.read_into``."""
        wanted = memoryview(buffer).nbytes
        if wanted == 0:
            return
        if not self._left or self._left[0] != wanted:
            raise FrameError(f"a frame whose part has {self._left[0] if self._left else 'no'} bytes, not {wanted}")
        self._left.pop(0)
        self._fill(buffer)

    def check(self) -> None:
        """ConnectionError if the other end is closed."""
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in self._poll.poll(0)):
            raise ConnectionError("the control socket is closed")

    def close(self) -> None:
        """See ``Channel.close``."""
        self._socket.close()

    def _fill(self, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        while len(view):
            try:
                received = self._socket.recv_into(view)
            except OSError as error:
                raise ConnectionError(f"the control socket is closed: {error.strerror}") from None
            if received == 0:
                raise ConnectionError("the control socket is closed")
            view = view[received:]
