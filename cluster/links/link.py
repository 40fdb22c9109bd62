"""The common part of all links: numbered control frames, the payload of layers, and how long an end waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from fastdecode.cluster.wire.frames import Channel, Conversation, Frame, Kind, decode
from fastdecode.cluster.wire.payload import PayloadSlots, aligned_memory
from fastdecode.core.errors import FrameError

SILENCE_SECONDS = 1.5
"""An R-worker that gives no sign of life for so long is lost, unless told otherwise (`--silence-seconds`); one whose
process ends is noticed at once."""

TICK_SECONDS = 0.2
"""How long a wait lasts before an R-worker, or a rank, looks at signals and its connection again."""

FRAME_FOLLOWS = 1 << 63
"""The word for a control frame, where two ends tell each other by words what comes next. Those of a layer are
mini-batch << 32 | layer."""

SPIN_SECONDS = 0.01
"""Most time of one spin: most layers take less, and for a longer one the cost of a wake-up does not matter."""

REST_SECONDS = 1.0
"""How long a thread that was disturbed does not spin."""

Found = TypeVar("Found")


class Beating(Protocol):
    """Signs of life of this process, until it is closed."""

    def close(self) -> None:
        """May be called twice."""


class Link(Conversation):
    """One end of a session between an S-worker and an R-worker: control frames, and q, k, v and o of each layer.

    This class sends payload as frames over its channel: q, k and v as one part, since every part costs both ends.
    Subclasses carry payload in other ways. Frames and payload arrive in one order. Every method raises ConnectionError,
    with the reason, once the other end is gone. ``make_beats``: for a session of that epoch, if it needs them.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.make_beats: Callable[[int], Beating] | None = None
        self._beats: Beating | None = None
        self._memory = aligned_memory(0)
        self._slots: PayloadSlots | None = None

    def place(self, slots: PayloadSlots) -> None:
        """Give the payload of the coming step its memory; on the R-worker before READY is sent, on the other end after.

        FrameError for a payload that this link cannot hold.
        """
        if slots.num_bytes > self._memory.nbytes:
            self._memory = aligned_memory(slots.num_bytes)
        slots.place(self._memory)
        self._slots = slots

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """Send q, k, v (PAYLOAD), or o and any partial results (OUTPUT) of one layer, C-contiguous, in the shapes of
        the plan; the latter lie in their places.

        The arrays must not change until the other end has answered. ValueError for other shapes.
        """
        slots = self._open_slots(kind)
        part = arrays[0] if len(arrays) == 1 else slots.answer(mini_batch, layer)
        if kind is Kind.PAYLOAD:
            slots.fill(mini_batch, layer, arrays)
            part = slots.stretch(mini_batch, layer)
        self.send(kind, part, mini_batch=mini_batch, layer=layer)

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """Fill q, k, v, or o and any partial results, with what ``frame`` brings.

        Raise FrameError if the sizes differ.
        """
        part, slots = arrays[0], self._slots
        if frame.kind is Kind.PAYLOAD and slots:
            part = slots.stretch(frame.mini_batch, frame.layer)
        elif len(arrays) > 1 and slots:
            part = slots.answer(frame.mini_batch, frame.layer)
        if frame.lengths != (part.nbytes, 0, 0):
            raise FrameError(
                f"a {frame.kind.name} of mini-batch {frame.mini_batch}, layer {frame.layer} with parts of "
                f"{frame.lengths} bytes, and the plan has {part.nbytes}"
            )
        self.read_into(part)
        if part is not arrays[0] and frame.kind is not Kind.PAYLOAD:
            self._copy_answer(frame, arrays)

    def _copy_answer(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """Fill o and any partial results from their places in the step's memory."""
        if self._slots:
            for array, place in zip(arrays, self._slots.views(frame.mini_batch, frame.layer)[3:], strict=False):
                np.copyto(array, place)

    def give_up(self, error: Exception) -> str:
        """Return the other end is lost, as ``error`` shows; return the reason."""
        return str(error)

    def begin_beats(self) -> None:
        """The other end has welcomed this one: from here on it can tell whether this process is stopped, or busy."""
        if self.make_beats and self._beats is None:
            self._beats = self.make_beats(self.epoch)

    def end_beats(self) -> None:
        """As where this process is stopped."""
        if self._beats:
            self._beats.close()

    def close(self) -> None:
        """May be called twice."""
        self.end_beats()
        self.channel.close()

    def _open_slots(self, kind: Kind) -> PayloadSlots:
        if self._slots is None:
            raise ValueError(f"a {kind.name}, and no step is open")
        return self._slots


class PartChannel:
    """Base of channels over ordered bytes: a header says which parts follow, and each is read or skipped."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. After a bad header such a channel cannot find the next: ConnectionError."""
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
        wanted = memoryview(buffer).nbytes
        if wanted == 0:
            return
        if not self._left or self._left[0] != wanted:
            raise FrameError(f"a frame whose part has {self._left[0] if self._left else 'no'} bytes, not {wanted}")
        self._left.pop(0)
        self._fill(buffer)

    def skip(self) -> None:
        """Drop the unread parts of the current message."""
        while self._left:
            self.read_into(bytearray(self._left[0]))

    def _header(self, timeout_seconds: float) -> bytearray | None:
        """Return the next message's header, None when none came in time."""
        raise NotImplementedError

    def _fill(self, buffer: Any) -> None:
        """Receive exactly this many bytes."""
        raise NotImplementedError


class Spin:
    """Busy-waiting, since to wake a process that sleeps takes longer (about 0.1 ms on a virtual machine).

    The thread yields its core at every look. Once another thread was seen to use the core, the spinning thread leaves
    it alone for REST_SECONDS. So no setting has to say which processes share cores.
    """

    def __init__(self, most_seconds: float = SPIN_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._rests_until = 0.0

    def until(self, look: Callable[[], Found]) -> Found:
        """Call ``look`` until it returns something true; its last answer when it is time to sleep instead."""
        found = look()
        now = time.perf_counter()
        end = now + self._most_seconds
        # A spinning thread that loses its core for so long shares it: its own threads of libzmq take less
        disturbed_seconds = 1e-3
        while not found and self._rests_until < now < end:
            os.sched_yield()
            before, now = now, time.perf_counter()
            found = look()
            if not found and now - before > disturbed_seconds:
                self._rests_until = now + REST_SECONDS
        return found
