"""Payload through memory that two processes share: q, k, v and o lie in it, and rings of words say what is there.

The memory is a memfd: it has no name, so that nothing of it is left once both processes are gone, however they went.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdecode._rworker import Ring
from fastdecode.cluster.frames import Conversation, Frame, Kind
from fastdecode.cluster.payload import PayloadSlots
from fastdecode.cluster.pulse import Heart, Pulse
from fastdecode.cluster.stream import StreamChannel
from fastdecode.errors import FrameError

HEAD_BYTES = 1 << 16
"""Both rings, and the R-worker's pulse in the last word, rounded to where a mapping may begin; the payload follows."""

CONTROL = 1 << 63
"""The word that says: a frame is on the control socket. Others are mini-batch << 32 | layer."""

FRAME_SECONDS = 30.0
"""A frame that was announced is there, or is being written."""


def make_memory() -> int:
    """A file descriptor of memory with two empty rings."""
    descriptor = os.memfd_create("fastdecode-payload", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, HEAD_BYTES)
    return descriptor


class SharedPath:
    """``Path`` over a control socket and shared memory; after a plan nothing of a layer goes through the socket."""

    def __init__(self, channel: StreamChannel, descriptor: int, is_s_worker: bool) -> None:
        """``descriptor``: of ``make_memory``; this closes it."""
        self.conversation = Conversation(channel)
        self._channel, self._descriptor, self._is_s_worker = channel, descriptor, is_s_worker
        head = _map(descriptor, HEAD_BYTES, 0)
        rings = [Ring(head[start : start + Ring.NUM_BYTES]) for start in (0, HEAD_BYTES // 2)]
        self._outbox, self._inbox = rings if is_s_worker else reversed(rings)
        beats = head[-8:].view(np.uint64)
        self._pulse = Pulse(beats) if is_s_worker else None
        self._heart = None if is_s_worker else Heart(beats)
        self._memory = np.zeros(0, np.uint8)
        self._slots: PayloadSlots | None = None

    def place(self, slots: PayloadSlots) -> None:
        """See ``Path.place``. The S-worker makes the memory larger where it must be; it never shrinks."""
        if slots.num_bytes > self._memory.nbytes:
            if self._is_s_worker:
                pages = -(-slots.num_bytes * 5 // 4 // mmap.PAGESIZE)
                os.ftruncate(self._descriptor, HEAD_BYTES + pages * mmap.PAGESIZE)
            size = os.fstat(self._descriptor).st_size - HEAD_BYTES
            if size < slots.num_bytes:
                raise FrameError(f"a plan whose payload takes {slots.num_bytes:,} bytes; {size:,} are shared")
            self._memory = _map(self._descriptor, size, HEAD_BYTES)
        slots.place(self._memory)
        self._slots = slots

    def send(self, kind: Kind, *parts: Any) -> None:
        """See ``Path.send``. The word goes first, so that a frame larger than a socket holds is read while written."""
        self._outbox.push(CONTROL)
        self.conversation.send(kind, *parts)

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.send_arrays``. An R-worker's o is in its place already."""
        if kind is Kind.PAYLOAD:
            self._copy(mini_batch, layer, arrays)
        self._outbox.push(mini_batch << 32 | layer)

    def next(self, timeout_seconds: float) -> Frame | None:
        """See ``Path.next``."""
        word = self._inbox.pop(timeout_seconds)
        if word is None:
            if timeout_seconds > 0:
                self._channel.check()
                if self._pulse:
                    self._pulse.check(timeout_seconds)
            return None
        if word == CONTROL:
            return self.conversation.receive(FRAME_SECONDS)
        kind = Kind.OUTPUT if self._is_s_worker else Kind.PAYLOAD
        return Frame(kind, self.conversation.epoch, 0, word >> 32, word & 0xFFFFFFFF, (0, 0, 0))

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.load``. An R-worker reads q, k, v where they lie."""
        if self._is_s_worker and self._slots:
            np.copyto(arrays[0], self._slots.views(frame.mini_batch, frame.layer)[3])

    def close(self) -> None:
        """See ``Path.close``."""
        if self._heart:
            self._heart.stop()
        self._channel.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _copy(self, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        if self._slots is None:
            raise ValueError("a PAYLOAD, and no step is open")
        self._slots.check(mini_batch, layer, arrays)
        for place, array in zip(self._slots.views(mini_batch, layer), arrays, strict=False):
            np.copyto(place, array)


def _map(descriptor: int, num_bytes: int, start: int) -> np.ndarray:
    """uint8 [num_bytes]; the mapping lives as long as the array."""
    return np.frombuffer(mmap.mmap(descriptor, num_bytes, offset=start), np.uint8)
