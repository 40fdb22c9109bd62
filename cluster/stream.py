"""Channels over bytes in order, and the one over a connected Unix socket, to R-workers that a process starts itself."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any

from fastdecode.cluster.frames import HEADER, decode
from fastdecode.errors import FrameError


class PartChannel:
    """What channels over ordered bytes share: a header says which parts follow, and each is read or skipped."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. Such a channel cannot go on after a bad header, so that ends the connection."""
        self.skip()
        header = self._header(timeout_seconds)
        if header is None:
            return None
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

    def skip(self) -> None:
        """Drop what is left of the message at hand."""
        while self._left:
            self.read_into(bytearray(self._left[0]))

    def _header(self, timeout_seconds: float) -> bytearray | None:
        """The next message's header, None when none came in time."""
        raise NotImplementedError

    def _fill(self, buffer: Any) -> None:
        """Receive exactly this many bytes."""
        raise NotImplementedError


PART_SECONDS = 5.0
"""Most time between two pieces of one frame: its writer has begun, and is on this machine."""


class StreamChannel(PartChannel):
    """``Channel`` over one end of a socket pair: both ends know each other, and nobody else can speak."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, parts: Sequence[Any]) -> None:
        """See ``Channel.send``."""
        try:
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise ConnectionError(f"the control socket is closed: {error.strerror}") from None

    def check(self) -> None:
        """ConnectionError if the other end is closed."""
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in self._poll.poll(0)):
            raise ConnectionError("the control socket is closed")

    def close(self) -> None:
        """See ``Channel.close``."""
        self._socket.close()

    def _header(self, timeout_seconds: float) -> bytearray | None:
        if not self._poll.poll(timeout_seconds * 1000):
            return None
        header = bytearray(HEADER.size)
        self._fill(header)
        return header

    def _fill(self, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        while len(view):
            if not self._poll.poll(PART_SECONDS * 1000):
                raise ConnectionError(f"a frame that it began did not go on within {PART_SECONDS:g} s")
            try:
                received = self._socket.recv_into(view)
            except OSError as error:
                raise ConnectionError(f"the control socket is closed: {error.strerror}") from None
            if received == 0:
                raise ConnectionError("the control socket is closed")
            view = view[received:]
