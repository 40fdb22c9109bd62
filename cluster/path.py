"""How frames and payload travel between the two ends of a session: here all of it as frames over one channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fastdecode.cluster.frames import Conversation, Frame, Kind
from fastdecode.cluster.payload import PayloadSlots, aligned_memory
from fastdecode.errors import FrameError


class Path(Protocol):
    """One end of a session. Control frames and payload arrive in one order, whatever carries them.

    ConnectionError, saying why, once the other end is gone.
    """

    conversation: Conversation

    def place(self, slots: PayloadSlots) -> None:
        """Give the payload of the step that begins its memory; before READY on the one side, after it on the other."""
        ...

    def send(self, kind: Kind, *parts: Any) -> None:
        """Send a control frame."""
        ...

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """Send q, k, v or o, C-contiguous; they are left alone until the other end has answered."""
        ...

    def next(self, timeout_seconds: float) -> Frame | None:
        """The next frame, None when none came in time; FrameError for one that does not belong here."""
        ...

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """Fill q, k, v or o with what ``frame`` brings; FrameError where the sizes differ."""
        ...

    def close(self) -> None:
        """May be called twice."""
        ...


class FramePath:
    """Payload as frames: q, k, v as one part, since every part costs both sides, and o, each received in its place."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.send = conversation.send
        self.next = conversation.receive
        self.close = conversation.channel.close
        self._memory = aligned_memory(0)
        self._slots: PayloadSlots | None = None

    def place(self, slots: PayloadSlots) -> None:
        """See ``Path.place``."""
        if slots.num_bytes > self._memory.nbytes:
            self._memory = aligned_memory(slots.num_bytes)
        slots.place(self._memory)
        self._slots = slots

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.send_arrays``."""
        if self._slots is None:
            raise ValueError(f"a {kind.name}, and no step is open")
        part = arrays[0]
        if kind is Kind.PAYLOAD:
            self._slots.fill(mini_batch, layer, arrays)
            part = self._slots.stretch(mini_batch, layer)
        self.conversation.send(kind, part, mini_batch=mini_batch, layer=layer)

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.load``."""
        part = arrays[0]
        if frame.kind is Kind.PAYLOAD and self._slots:
            part = self._slots.stretch(frame.mini_batch, frame.layer)
        if frame.lengths != (part.nbytes, 0, 0):
            raise FrameError(
                f"a {frame.kind.name} of mini-batch {frame.mini_batch}, layer {frame.layer} with parts of "
                f"{frame.lengths} bytes, and the plan has {part.nbytes}"
            )
        self.conversation.channel.read_into(part)
