"""Frames and payload between two ranks of an MPI job.

Words give the order: one says that a control frame follows, or that q, k, v or o of a layer are there. Payload travels
beside them, q, k, v as one message, for each costs both sides: they know its size from the step's plan and expect it
before it is sent.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdecode.cluster.frames import HEADER, Conversation, Frame, Kind
from fastdecode.cluster.mpi_progress import Progress
from fastdecode.cluster.payload import PayloadSlots, aligned_memory
from fastdecode.cluster.spin import Spin
from fastdecode.cluster.stream import PartChannel
from fastdecode.errors import FrameError

if TYPE_CHECKING:
    from fastdecode.cluster.mpi import MpiPeer

CONTROL = 1 << 63
"""The word for a control frame. Those of a layer are mini-batch << 32 | layer."""

HANG_UP = CONTROL | 1
"""The word that ends a session's use of the connection; answered by itself, so that nothing of it is left."""

OVER = CONTROL | 2
"""The word that ends the job; answered like the other."""

MESSAGE_SECONDS = 30.0
"""A message that was announced is there, or is being written."""

HANG_UP_SECONDS = 5.0
TICK_SECONDS = 0.2

_CONTROL_TAG, _PAYLOAD_TAG = 2, 3


class MpiChannel(PartChannel):
    """``Channel`` of control frames: the header and each part are messages of their own."""

    def __init__(self, peer: MpiPeer) -> None:
        super().__init__()
        self._peer = peer
        self._sent: list[Any] = []

    def send(self, parts: Sequence[Any]) -> None:
        """See ``Channel.send``."""
        self._sent = [each for each in self._sent if not self._peer.done([each])]
        self._sent += [self._peer.send(part, _CONTROL_TAG) for part in parts if memoryview(part).nbytes]

    def close(self) -> None:
        """See ``Channel.close``; what was sent is there then."""
        sent, self._sent = self._sent, []
        self._peer.wait(sent, MESSAGE_SECONDS)

    def _header(self, timeout_seconds: float) -> bytearray | None:
        header = bytearray(HEADER.size)
        self._fill(header)
        return header

    def _fill(self, buffer: Any) -> None:
        if not self._peer.wait([self._peer.receive(buffer, _CONTROL_TAG)], MESSAGE_SECONDS):
            raise ConnectionError(f"a message that it announced did not come within {MESSAGE_SECONDS:g} s")


class MpiPath:
    """``Path`` to another rank. ``over`` is true once the S-worker has said that the job is."""

    def __init__(self, peer: MpiPeer, progress: Progress | None = None) -> None:
        """``progress``: the S-worker's communication thread; None on an R-worker."""
        self._channel = MpiChannel(peer)
        self.conversation = Conversation(self._channel)
        self._peer, self._progress = peer, progress
        self._spin = Spin()
        self._memory = aligned_memory(0)
        self._slots: PayloadSlots | None = None
        self._expected: dict[int, list[Any]] = {}
        self._sent: dict[int, list[Any]] = {}
        self._last_word = 0
        self._cut = self._closed = False
        if progress:
            progress.watch(self)

    @property
    def over(self) -> bool:
        """True once the S-worker has said that the job is over."""
        return self._last_word == OVER

    def move_on(self) -> bool:
        """See ``Watched.move_on``."""
        sent = [request for requests in list(self._sent.values()) for request in requests]
        return not self._peer.done(sent)

    def place(self, slots: PayloadSlots) -> None:
        """See ``Path.place``. An R-worker expects the first layer of every mini-batch from now on."""
        self._withdraw()
        if slots.num_bytes > self._memory.nbytes:
            self._memory = aligned_memory(slots.num_bytes)
        slots.place(self._memory)
        self._slots = slots
        if not self._progress:
            for mini_batch in range(slots.num_mini_batches):
                self._expect(slots, mini_batch, 0)

    def send(self, kind: Kind, *parts: Any) -> None:
        """See ``Path.send``."""
        if self._cut:
            raise ConnectionError("Ctrl-C cut a message to it short")
        self._peer.send_word(CONTROL)
        self.conversation.send(kind, *parts)

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.send_arrays``. The answer, which is o or the next layer's q, k, v, is expected before it is asked
        for. Ctrl-C in the midst of this loses the R-worker."""
        if self._slots is None:
            raise ValueError(f"a {kind.name}, and no step is open")
        part = arrays[0]
        if self._progress:
            self._slots.fill(mini_batch, layer, arrays)
            part = self._slots.stretch(mini_batch, layer)
        self._expect(self._slots, mini_batch, layer if self._progress else layer + 1)
        self._cut = True
        sent = [self._peer.send(part, _PAYLOAD_TAG + mini_batch)] if part.nbytes else []
        self._sent[mini_batch] = [*sent, self._peer.send_word(mini_batch << 32 | layer)]
        self._cut = False
        if self._progress and not self._peer.done(self._sent[mini_batch]):
            self._progress.nudge()

    def next(self, timeout_seconds: float) -> Frame | None:
        """See ``Path.next``."""
        return self._take() if self._peer.word_is_there(timeout_seconds) else None

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """See ``Path.load``. An R-worker reads q, k, v where they lie."""
        if self._progress and self._slots:
            np.copyto(arrays[0], self._slots.views(frame.mini_batch, frame.layer)[3])

    def close(self) -> None:
        """See ``Path.close``. Both sides wait until the other has no more to say; an R-worker, until it is told."""
        if self._closed:
            return
        self._closed = True
        if self._progress:
            self._progress.forget(self)
            self._peer.send_word(HANG_UP)
        self._drain(HANG_UP_SECONDS if self._progress else math.inf)
        if not self._progress:
            self._peer.send_word(self._last_word)
        self._channel.close()
        self._withdraw()

    def _take(self) -> Frame:
        """The frame of the word that is there, with its payload."""
        self._cut = True
        word = self._last_word = self._peer.take_word()
        self._cut = False
        if word in (HANG_UP, OVER):
            raise ConnectionError("it hung up")
        if word == CONTROL:
            frame = self.conversation.receive(MESSAGE_SECONDS)
            if frame is None:
                raise ConnectionError("it announced a frame and sent none")
            return frame
        mini_batch = word >> 32
        self._finish(self._sent.pop(mini_batch, []) + self._expected.pop(mini_batch, []))
        kind = Kind.OUTPUT if self._progress else Kind.PAYLOAD
        return Frame(kind, self.conversation.epoch, 0, mini_batch, word & 0xFFFFFFFF, (0, 0, 0))

    def _expect(self, slots: PayloadSlots, mini_batch: int, layer: int) -> None:
        if layer < slots.num_layers:
            part = slots.views(mini_batch, layer)[3] if self._progress else slots.stretch(mini_batch, layer)
            received = [self._peer.receive(part, _PAYLOAD_TAG + mini_batch)] if part.nbytes else []
            self._expected[mini_batch] = received

    def _finish(self, requests: list[Any]) -> None:
        done = self._spin.until(lambda: self._peer.done(requests)) or self._peer.wait(requests, MESSAGE_SECONDS)
        if not done:
            raise ConnectionError(f"payload did not come within {MESSAGE_SECONDS:g} s")

    def _withdraw(self) -> None:
        """Leave nothing of a step behind: whatever was sent has arrived, and what is expected will not come."""
        expected, sent = list(self._expected.values()), list(self._sent.values())
        self._expected, self._sent = {}, {}
        for requests in sent:
            self._finish(requests)
        for requests in expected:
            self._peer.cancel(requests)

    def _drain(self, most_seconds: float) -> None:
        deadline = time.monotonic() + most_seconds
        while self._last_word not in (HANG_UP, OVER) and time.monotonic() < deadline:
            with contextlib.suppress(ConnectionError, FrameError):
                self.next(TICK_SECONDS)
        self._channel.skip()
