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
    """Payload as parts of frames, received straight into their arrays."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.send = conversation.send
        self.next = conversation.receive
        self.close = conversation.channel.close
        self._memory = aligned_memory(0)

    def place(self, slots: PayloadSlots) -> None:
        """See ``Path.place``."""
        if slots.num_bytes > self._memory.nbytes:
            self._memory = aligned_memory(slots.num_bytes)
        slots.place(self._memory)

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.send_arrays``."""
        self.conversation.send(kind, *arrays, mini_batch=mini_batch, layer=layer)

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.load``."""
        sizes = [array.nbytes for array in arrays]
        if list(frame.lengths) != sizes + [0] * (len(frame.lengths) - len(sizes)):
            raise FrameError(
                f"a {frame.kind.name} of mini-batch {frame.mini_batch}, layer {frame.layer} with parts of "
                f"{frame.lengths} bytes, and the plan has {sizes}"
            )
        for array in arrays:
            self.conversation.channel.read_into(array)
