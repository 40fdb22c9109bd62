"""``Link``, the base of all links; ``PartChannel``, the base of channels over a byte stream; ``Spin``, busy waiting."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from fastdecode.cluster.wire.frames import Channel, Conversation, Frame, Kind, decode
from fastdecode.cluster.wire.payload import PayloadSlots, aligned_memory
from fastdecode.core.errors import FrameError

SILENCE_SECONDS = 1.5
"""The default time after which the S-worker drops an R-worker that has sent nothing (`--silence-seconds`).

If the R-worker's process ends, the S-worker notices at once.
"""

TICK_SECONDS = 0.2
"""Seconds that an R-worker or a rank waits before it checks signals and its connection again."""

FRAME_FOLLOWS = 1 << 63
"""The 64-bit word that announces a control frame, on links that announce each message by a word.

The word that announces a layer's payload is mini-batch << 32 | layer.
"""

SPIN_SECONDS = 0.01
"""Longest busy wait. Most layers take less time; for longer ones the cost of a wake-up does not matter."""

REST_SECONDS = 1 / 64, 1.0
"""Least and most seconds for which a thread does not busy-wait after another thread was seen on its core."""

Found = TypeVar("Found")


class Beating(Protocol):
    """Sends heartbeats to the other end of a link until ``close``."""

    def close(self) -> None:
        """Stop; may be called twice."""


class Link(Conversation):
    """One end of a session between an S-worker and an R-worker: control frames, and q, k, v and o of each layer.

    This class sends payload (q, k, v and o) as frames over its channel. A frame has q, k and v in one part, since every
    part costs both ends time. Subclasses send payload in other ways. Frames and payload arrive in the order of sending.
    Every method raises ConnectionError, with the reason, once the other end is gone. ``make_beats``: a function that
    returns the ``Beating`` of the session with a given epoch; None if this link needs no heartbeats of its own.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.make_beats: Callable[[int], Beating] | None = None
        self._beats: Beating | None = None
        self._memory = aligned_memory(0)
        self._slots: PayloadSlots | None = None

    def place(self, slots: PayloadSlots) -> None:
        """Assign memory to ``slots``, the payload of the coming step.

        The R-worker calls this before it sends READY, the S-worker after it has received READY.

        Raise FrameError for a payload that this link cannot hold.
        """
        if slots.num_bytes > self._memory.nbytes:
            self._memory = aligned_memory(slots.num_bytes)
        slots.place(self._memory)
        self._slots = slots

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """Send q, k, v (PAYLOAD), or o and any partial results (OUTPUT), of one layer.

        The arrays are C-contiguous with the shapes of the plan; o and partial results already lie in the payload
        memory. The arrays must not change until the other end has answered. Raise ValueError for other shapes.
        """
        slots = self._open_slots(kind)
        part = arrays[0] if len(arrays) == 1 else slots.answer(mini_batch, layer)
        if kind is Kind.PAYLOAD:
            slots.fill(mini_batch, layer, arrays)
            part = slots.stretch(mini_batch, layer)
        self.send(kind, part, mini_batch=mini_batch, layer=layer)

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """Fill q, k, v, or o and any partial results, with the content of ``frame``.

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
                f"{frame.lengths} bytes; by the plan it has one part of {part.nbytes}"
            )
        self.read_into(part)
        if part is not arrays[0] and frame.kind is not Kind.PAYLOAD:
            self._copy_answer(frame, arrays)

    def _copy_answer(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """Copy o and any partial results out of the payload memory."""
        if self._slots:
            for array, place in zip(arrays, self._slots.views(frame.mini_batch, frame.layer)[3:], strict=False):
                np.copyto(array, place)

    def give_up(self, error: Exception) -> str:
        """Close the link, since ``error`` shows that the other end is lost; return the reason."""
        return str(error)

    def begin_beats(self) -> None:
        """Start to send heartbeats, after WELCOME. They let the other end tell a stopped process from a busy one."""
        if self.make_beats and self._beats is None:
            self._beats = self.make_beats(self.epoch)

    def end_beats(self) -> None:
        """Stop the heartbeats that ``begin_beats`` started."""
        if self._beats:
            self._beats.close()

    def close(self) -> None:
        """Close the link; may be called twice."""
        self.end_beats()
        self.channel.close()

    def _open_slots(self, kind: Kind) -> PayloadSlots:
        if self._slots is None:
            raise ValueError(f"a {kind.name} came, and no step is open")
        return self._slots


class PartChannel:
    """Base of channels over an ordered byte stream.

    A message is a header and up to three parts. The header has the length of each part; the receiver reads or skips it.
    """

    def __init__(self) -> None:
        self._left: list[int] = []

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. Raise ConnectionError after a bad header, since the next header cannot be found."""
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
        """Return the next message's header; None if none came in time."""
        raise NotImplementedError

    def _fill(self, buffer: Any) -> None:
        """Receive bytes until ``buffer`` is full."""
        raise NotImplementedError


class Spin:
    """Waits busily, since waking a sleeping process takes about 0.1 ms on a virtual machine.

    The thread yields its core after every call of ``look``. If another thread then uses the core, this thread rests: it
    does not spin for a while. Rests grow while the core stays shared, so no setting has to say which cores are shared.
    """

    def __init__(self, most_seconds: float = SPIN_SECONDS, now: Callable[[], float] = time.perf_counter) -> None:
        self._most_seconds, self._now = most_seconds, now
        self._rest_seconds, self._rests_until = REST_SECONDS[0], -math.inf

    def until(self, look: Callable[[], Found]) -> Found:
        """Call ``look`` until its result is true, for SPIN_SECONDS at most or until a rest; return the last result."""
        found = look()
        now = self._now()
        end = now + self._most_seconds
        # If this thread loses its core for longer, another process uses the core too, so busy waiting must stop.
        # Shorter losses are ignored: libzmq's threads in this process cause them.
        disturbed_seconds = 1e-3
        while not found and self._rests_until < now < end:
            os.sched_yield()
            before, now = now, self._now()
            found = look()
            if not found and now - before > disturbed_seconds:
                self._rest(now)
        return found

    def _rest(self, now: float) -> None:
        """Rest from ``now`` on: twice as long if the last rest ended just before, half as long if it ended long ago."""
        again = now - self._rests_until < 4 * self._rest_seconds
        wanted = self._rest_seconds * (2 if again else 0.5)
        self._rest_seconds = min(max(wanted, REST_SECONDS[0]), REST_SECONDS[1])
        self._rests_until = now + self._rest_seconds
