"""Requests to one R-worker in another process and its answers, over any link."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from fastdecode.cluster.links.link import Link, Spin
from fastdecode.cluster.wire.frames import FRAME_LIMIT, Frame, Kind
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.cluster.wire.messages import CLOCK, decode_refusal
from fastdecode.core.errors import (
    BackendError,
    BusyError,
    CapacityError,
    DamagedError,
    FrameError,
    SupersededError,
    WorkerLostError,
    interrupts_deferred,
)

Answer = TypeVar("Answer")

TICK_SECONDS = 0.05
"""Seconds between checks of the connection while the S-worker waits."""

ANSWER_SECONDS = 120.0
"""Most seconds for an answer, by default. An answer takes under a millisecond, unless the machine stalls."""


class Calls:
    """Sends requests over one R-worker's link. Once the link is lost, every call raises WorkerLostError.

    ``link``: None before it is set, and after it is closed. ``lost``: why calls are no longer answered, or "".
    ``owed``: called before the next request is sent; receives an answer that nobody has waited for yet.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.link: Link | None = None
        self.lost = ""
        self.losses = _Losses(self)
        self.owed: Callable[[], None] | None = None
        self.spin = Spin()

    @interrupts_deferred()
    def ask(
        self,
        kind: Kind,
        body: bytes,
        answer: Kind,
        decode: Callable[[bytearray], Answer],
        most_bytes: int = FRAME_LIMIT,
        spins: bool = True,
    ) -> Answer:
        """Send a frame of ``kind``; wait for frame ``answer``; return its decoded body. ``spins``: see ``answer``."""
        self.send(kind, body)
        with self.losses:
            return decode(self.body(self.answer(answer, spins=spins), most_bytes))

    def close(self, farewell: bool = True) -> None:
        """Send BYE, if ``farewell`` is set and the link is not broken, and close the link; may be called twice."""
        link, self.link = self.link, None
        if link is None:
            return
        try:
            if farewell and not self.lost:
                link.send(Kind.BYE)
        except ConnectionError:
            pass  # the R-worker is gone already
        finally:
            link.close()

    def answer(
        self, kind: Kind, most_seconds: float = ANSWER_SECONDS, discard: bool = False, spins: bool = True
    ) -> Frame:
        """Return the next frame, which must be of ``kind``. With ``discard``, other frames before it are dropped.

        ``spins``: False if the R-worker's answer may need all cores, including this one.
        """
        deadline = time.monotonic() + most_seconds
        while True:
            frame = self.spin.until(lambda: self.next(0.0, discard)) if spins else None
            frame = frame or self.next(TICK_SECONDS, discard)
            if frame is None and time.monotonic() > deadline:
                raise self.lose(f"no answer came within {most_seconds:g} s")
            if frame is not None and frame.kind is kind:
                return frame
            if frame is not None and not discard:
                raise self.lose(f"a {frame.kind.name} frame came in place of {kind.name}")

    def next(self, timeout_seconds: float, discard: bool = False) -> Frame | None:
        with self.losses as link:
            frame = link.receive(timeout_seconds)
        if frame is not None and frame.kind is Kind.REFUSED:
            with self.losses:
                error, message = decode_refusal(self.body(frame, MAX_JSON_BYTES))
            refusal = _refusal(self.name, error, message)
            if isinstance(refusal, SupersededError | DamagedError):
                self.lost = str(refusal)  # from now on, calls raise WorkerLostError
            if self.lost or not discard:
                raise refusal
        return frame

    def ping(self) -> float:
        """Ask the R-worker for its clock; return the clock's time in seconds."""
        self.send(Kind.PING)
        return float(self.number(self.answer(Kind.PONG), CLOCK))

    def send(self, kind: Kind, *parts: bytes | np.ndarray) -> None:
        if self.owed:
            self.owed()
        with self.losses as link:
            link.send(kind, *parts)

    def body(self, frame: Frame, *most_bytes: int) -> bytearray:
        with self.losses as link:
            return link.body(frame, *most_bytes)

    def number(self, frame: Frame, form: struct.Struct) -> Any:
        """Return the number in the body of ``frame``, packed as ``form``."""
        try:
            (number,) = form.unpack(self.body(frame, form.size))
        except struct.error:
            raise self.lose(f"a {frame.kind.name} frame has {frame.lengths[0]} bytes, not {form.size}") from None
        if not math.isfinite(number):
            raise self.lose(f"a {frame.kind.name} frame has the number {number}, which is not finite")
        return number

    def lose(self, reason: str) -> WorkerLostError:
        self.lost = f"R-worker {self.name} is lost: {reason}"
        return WorkerLostError(self.lost)


class _Losses:
    """A context in which errors of a worker's link become a WorkerLostError with the worker's name.

    It is a class, since ``contextlib.contextmanager`` is slower and the context is entered several times per layer.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __enter__(self) -> Link:
        calls = self._calls
        if calls.lost:
            raise WorkerLostError(calls.lost)
        if calls.link is None:
            raise BackendError(f"R-worker {calls.name} is closed")
        return calls.link

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ConnectionError | FrameError):
            link = self._calls.link
            raise self._calls.lose(link.give_up(error) if link else str(error)) from error


def _refusal(name: str, error: str, message: str) -> Exception:
    """Return the exception for a refusal by R-worker ``name``: ``error`` chooses its type, ``message`` is its text."""
    if error == "capacity":
        return CapacityError(f"R-worker {name}: {message}")
    if error == "busy":
        return BusyError(f"R-worker {name} refused: {message}")
    if error == "superseded":
        return SupersededError(f"R-worker {name}: {message}")
    if error == "damaged":
        return DamagedError(f"R-worker {name}: {message}")
    if error == "refused":
        return ValueError(message)
    return BackendError(f"R-worker {name} refused: {message}")
