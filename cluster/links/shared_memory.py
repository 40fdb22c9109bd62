"""The link to an R-worker on this machine: control frames over a socket pair, payload in shared memory.

q, k, v and o are in a memfd, a file in memory. Rings of 64-bit words announce each layer. A memfd has no name, so the
system frees it once both processes have ended in any way.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdecode._rworker import Ring
from fastdecode.cluster.links.link import FRAME_FOLLOWS, SILENCE_SECONDS, SPIN_SECONDS, Link, PartChannel
from fastdecode.cluster.wire.frames import HEADER, Frame, Kind
from fastdecode.cluster.wire.payload import PayloadSlots
from fastdecode.core.errors import FrameError

BEAT_SECONDS = 0.2
HEAD_BYTES = 1 << 16
"""Bytes before the payload: both rings of words, and the R-worker's heartbeat in the last word, in whole pages."""


def make_memory() -> int:
    """Return a file descriptor of a new memfd with two empty rings of words."""
    descriptor = os.memfd_create("fastdecode-payload", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, HEAD_BYTES)
    return descriptor


class SharedMemoryLink(Link):
    """A ``Link`` over a control socket and shared memory. The payload of layers never uses the socket."""

    def __init__(
        self, control: socket.socket, descriptor: int, is_s_worker: bool, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        """``control``: one end of a socket pair. ``descriptor``: from ``make_memory``. The link closes both."""
        self._stream = StreamChannel(control)
        super().__init__(self._stream)
        self._descriptor, self._is_s_worker = descriptor, is_s_worker
        head = _map(descriptor, HEAD_BYTES, 0)
        rings = [Ring(head[start : start + Ring.NUM_BYTES]) for start in (0, HEAD_BYTES // 2)]
        self._outbox, self._inbox = rings if is_s_worker else reversed(rings)
        beats = head[-8:].view(np.uint64)
        self._monitor = HeartbeatMonitor(beats, silence_seconds) if is_s_worker else None
        self._heartbeat = None if is_s_worker else Heartbeat(beats)

    def place(self, slots: PayloadSlots) -> None:
        """See ``Link.place``. The S-worker enlarges the shared memory if needed, and never shrinks it."""
        if slots.num_bytes > self._memory.nbytes:
            if self._is_s_worker:
                pages = -(-slots.num_bytes * 5 // 4 // mmap.PAGESIZE)
                os.ftruncate(self._descriptor, HEAD_BYTES + pages * mmap.PAGESIZE)
            size = os.fstat(self._descriptor).st_size - HEAD_BYTES
            if size < slots.num_bytes:
                raise FrameError(
                    f"a plan whose payload takes {slots.num_bytes:,} bytes; the shared memory has {size:,}"
                )
            self._memory = _map(self._descriptor, size, HEAD_BYTES)
        slots.place(self._memory)
        self._slots = slots

    def send(self, kind: Kind, *parts: Any, mini_batch: int = 0, layer: int = 0) -> None:
        """See ``Conversation.send``.

        The word that announces the frame goes first. So the other end already reads while a large frame is being sent.
        """
        self._outbox.push(FRAME_FOLLOWS)
        super().send(kind, *parts, mini_batch=mini_batch, layer=layer)

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """See ``Link.send_arrays``. An R-worker's o is already in place."""
        if kind is Kind.PAYLOAD:
            self._open_slots(kind).fill(mini_batch, layer, arrays)
        self._outbox.push(mini_batch << 32 | layer)

    def receive(self, timeout_seconds: float) -> Frame | None:
        """See ``Conversation.receive``.

        Unread parts of the last frame are dropped before the next word is awaited. Their sender pushes that word only
        once the socket has taken all of them, and the socket's buffer may be smaller.
        """
        self._stream.skip()
        word = self._inbox.pop(timeout_seconds)
        if word is None:
            if timeout_seconds > 0:
                self._stream.check()
                if self._monitor:
                    self._monitor.check(timeout_seconds)
            return None
        if word == FRAME_FOLLOWS:
            return self._announced()
        kind = Kind.OUTPUT if self._is_s_worker else Kind.PAYLOAD
        return Frame(kind, self.epoch, 0, word >> 32, word & 0xFFFFFFFF, (0, 0, 0))

    def _announced(self) -> Frame:
        # Longest wait for an announced frame. The sender writes the frame right after the announcing word.
        frame_seconds = 5.0
        frame = super().receive(frame_seconds)
        if frame is None:
            raise ConnectionError(f"the other process announced a frame and did not send it within {frame_seconds:g} s")
        return frame

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """See ``Link.load``. An R-worker reads q, k, v in place."""
        if self._is_s_worker:
            self._copy_answer(frame, arrays)

    def close(self) -> None:
        if self._heartbeat:
            self._heartbeat.stop()
        self._stream.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._memory = np.zeros(0, np.uint8)
        if self._slots:  # drop the views of the shared memory, which keep it mapped and a file descriptor open
            self._slots.place(self._memory)


class StreamChannel(PartChannel):
    """A ``Channel`` over one end of a socket pair, which no third process can reach."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, parts: Sequence[Any]) -> None:
        try:
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise ConnectionError(f"the control socket is closed: {error.strerror}") from None

    def check(self) -> None:
        """Raise ConnectionError if the other end is closed."""
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in self._poll.poll(0)):
            raise ConnectionError("the control socket is closed")

    def close(self) -> None:
        self._socket.close()

    def _header(self, timeout_seconds: float) -> bytearray | None:
        if not self._poll.poll(timeout_seconds * 1000):
            return None
        header = bytearray(HEADER.size)
        self._fill(header)
        return header

    def _fill(self, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        # Most seconds between two pieces of one frame; the sender is on this machine, so they come quickly
        part_seconds = 5.0
        while len(view):
            if not self._poll.poll(part_seconds * 1000):
                raise ConnectionError(
                    f"the other process began a frame and did not continue it within {part_seconds:g} s"
                )
            try:
                received = self._socket.recv_into(view)
            except OSError as error:
                raise ConnectionError(f"the control socket is closed: {error.strerror}") from None
            if received == 0:
                raise ConnectionError("the control socket is closed")
            view = view[received:]


class SilenceError(ConnectionError):
    """The other process exists, but has sent no heartbeat for too long."""


class Heartbeat:
    """Increments ``word``, uint64 [1], every BEAT_SECONDS in its own thread, also while other threads compute."""

    def __init__(self, word: np.ndarray) -> None:
        self._word = word
        self._word += np.uint64(1)
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop the heartbeat; may be called twice."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self._word += np.uint64(1)


class HeartbeatMonitor:
    """Watches the other end's :class:`Heartbeat`."""

    def __init__(self, word: np.ndarray, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._word, self._most_seconds = word, silence_seconds
        self._last = 0
        self._silent_seconds = self._looked = 0.0

    def check(self, waited_seconds: float) -> None:
        """Check the heartbeat after a wait of ``waited_seconds`` that timed out.

        Raise SilenceError once the waits without a beat add up to ``silence_seconds``.

        Only time spent waiting counts. So a process that was suspended itself sees new beats before it raises.
        Silence before the first beat is ignored, since the other process is starting.
        """
        beats, before, self._looked = int(self._word[0]), self._looked, time.monotonic()
        if beats != self._last or beats == 0:
            self._last, self._silent_seconds = beats, 0.0
            return
        self._silent_seconds += min(self._looked - before, waited_seconds + SPIN_SECONDS)
        if self._silent_seconds >= self._most_seconds:
            raise SilenceError(f"the other process has shown no sign of life for {self._most_seconds:g} s")


def _map(descriptor: int, num_bytes: int, start: int) -> np.ndarray:
    """Map ``num_bytes`` bytes of a file from offset ``start``; return uint8 [num_bytes], which keeps the mapping."""
    return np.frombuffer(mmap.mmap(descriptor, num_bytes, offset=start), np.uint8)
