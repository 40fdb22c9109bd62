"""The link between two ranks of an MPI job; ``mpi_job.py`` has the job itself.

A word announces a control frame, or the q, k, v or o of a layer. Payload is sent separately, with q, k, v as one
message, since every message costs both ends time. Both ends know the payload's size from the step's plan, and post the
receive in advance.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdecode.cluster.links.link import FRAME_FOLLOWS, TICK_SECONDS, Link, PartChannel, Spin
from fastdecode.cluster.links.mpi_job import (
    HANG_UP,
    OVER,
)
from fastdecode.cluster.wire.frames import HEADER, Frame, Kind
from fastdecode.cluster.wire.payload import PayloadSlots
from fastdecode.core.errors import FrameError

if TYPE_CHECKING:
    from fastdecode.cluster.links.mpi import MpiPeer, SendProgress

MESSAGE_SECONDS = 30.0
"""Most seconds between a word and the message that it announces."""

_CONTROL_TAG, _PAYLOAD_TAG = 2, 3


class MpiChannel(PartChannel):
    """A ``Channel`` of control frames over MPI: the header and each part are separate messages."""

    def __init__(self, peer: MpiPeer) -> None:
        super().__init__()
        self._peer = peer
        self._sent: list[Any] = []

    def send(self, parts: Sequence[Any]) -> None:
        self._sent = [each for each in self._sent if not self._peer.done([each])]
        self._sent += [self._peer.send(part, _CONTROL_TAG) for part in parts if memoryview(part).nbytes]

    def close(self) -> None:
        """See ``Channel.close``. Waits until all sent messages have arrived."""
        sent, self._sent = self._sent, []
        self._peer.wait(sent, MESSAGE_SECONDS)

    def _header(self, timeout_seconds: float) -> bytearray | None:
        header = bytearray(HEADER.size)
        self._fill(header)
        return header

    def _fill(self, buffer: Any) -> None:
        if not self._peer.wait([self._peer.receive(buffer, _CONTROL_TAG)], MESSAGE_SECONDS):
            raise ConnectionError(
                f"the other rank announced a message and did not send it within {MESSAGE_SECONDS:g} s"
            )


class MpiLink(Link):
    """A ``Link`` to another rank of the MPI job."""

    def __init__(self, peer: MpiPeer, progress: SendProgress | None = None) -> None:
        """``progress``: the S-worker's communication thread; None on an R-worker."""
        self._messages = MpiChannel(peer)
        super().__init__(self._messages)
        self._peer, self._progress = peer, progress
        self._spin = Spin()
        self._expected: dict[int, list[Any]] = {}
        self._sent: dict[int, list[Any]] = {}
        self._last_word = 0
        self._cut = self._closed = False
        if progress:
            progress.watch(self)

    @property
    def over(self) -> bool:
        """True once the S-worker has sent the word OVER, which ends the job."""
        return self._last_word == OVER

    def move_on(self) -> bool:
        sent = [request for requests in list(self._sent.values()) for request in requests]
        return not self._peer.done(sent)

    def place(self, slots: PayloadSlots) -> None:
        """See ``Link.place``. An R-worker posts the receives for the first layer of every mini-batch."""
        self._withdraw()
        super().place(slots)
        if not self._progress:
            for mini_batch in range(slots.num_mini_batches):
                self._expect(slots, mini_batch, 0)

    def send(self, kind: Kind, *parts: Any, mini_batch: int = 0, layer: int = 0) -> None:
        if self._cut:
            raise ConnectionError("Ctrl-C cut a message short")
        self._peer.send_word(FRAME_FOLLOWS)
        super().send(kind, *parts, mini_batch=mini_batch, layer=layer)

    def send_arrays(self, kind: Kind, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """See ``Link.send_arrays``. Posts the receive for the other end's next payload first.

        If Ctrl-C interrupts this call, the R-worker is lost.
        """
        slots = self._open_slots(kind)
        part = arrays[0] if len(arrays) == 1 else slots.answer(mini_batch, layer)
        if self._progress:
            slots.fill(mini_batch, layer, arrays)
            part = slots.stretch(mini_batch, layer)
        self._expect(slots, mini_batch, layer if self._progress else layer + 1)
        self._cut = True
        sent = [self._peer.send(part, _PAYLOAD_TAG + mini_batch)] if part.nbytes else []
        self._sent[mini_batch] = [*sent, self._peer.send_word(mini_batch << 32 | layer)]
        self._cut = False
        if self._progress and not self._peer.done(self._sent[mini_batch]):
            self._progress.nudge()

    def receive(self, timeout_seconds: float) -> Frame | None:
        return self._take() if self._peer.word_is_there(timeout_seconds) else None

    def load(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        """See ``Link.load``. An R-worker reads q, k, v in place."""
        if self._progress:
            self._copy_answer(frame, arrays)

    def close(self) -> None:
        """See ``Link.close``. Each end waits for the word HANG_UP or OVER of the other; an R-worker waits forever."""
        if self._closed:
            return
        self._closed = True
        if self._progress:
            self._progress.forget(self)
            self._peer.send_word(HANG_UP)
        hang_up_seconds = 5.0
        self._drain(hang_up_seconds if self._progress else math.inf)
        if not self._progress:
            self._peer.send_word(self._last_word)
        self._messages.close()
        self._withdraw()

    def _take(self) -> Frame:
        """Take the word that has arrived; return the frame that it announces, with the frame's payload."""
        self._cut = True
        word = self._last_word = self._peer.take_word()
        self._cut = False
        if word in (HANG_UP, OVER):
            raise ConnectionError("the other rank hung up")
        if word == FRAME_FOLLOWS:
            frame = super().receive(MESSAGE_SECONDS)
            if frame is None:
                raise ConnectionError("the other rank announced a frame and sent none")
            return frame
        mini_batch = word >> 32
        self._finish(self._sent.pop(mini_batch, []) + self._expected.pop(mini_batch, []))
        kind = Kind.OUTPUT if self._progress else Kind.PAYLOAD
        return Frame(kind, self.epoch, 0, mini_batch, word & 0xFFFFFFFF, (0, 0, 0))

    def _expect(self, slots: PayloadSlots, mini_batch: int, layer: int) -> None:
        if layer < slots.num_layers:
            part = slots.answer(mini_batch, layer) if self._progress else slots.stretch(mini_batch, layer)
            received = [self._peer.receive(part, _PAYLOAD_TAG + mini_batch)] if part.nbytes else []
            self._expected[mini_batch] = received

    def _finish(self, requests: list[Any]) -> None:
        done = self._spin.until(lambda: self._peer.done(requests)) or self._peer.wait(requests, MESSAGE_SECONDS)
        if not done:
            raise ConnectionError(f"payload did not come within {MESSAGE_SECONDS:g} s")

    def _withdraw(self) -> None:
        """Wait until the step's sent messages have arrived, then cancel its posted receives."""
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
                self.receive(TICK_SECONDS)
        self._messages.skip()
