"""Where the S-worker's one thread spends its time: always in exactly one state."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

MODEL = "s"
"""Model code runs, head and sampling included."""
WAIT = "wait"
"""No mini-batch can be resumed: its attention is still under way."""
HOST = "host"
"""Scheduling, plans, detokenising, bookkeeping."""


class Span(NamedTuple):
    """One stay in a state, in seconds of ``time.perf_counter``; -1 where no mini-batch or layer applies."""

    state: str
    mini_batch: int
    layer: int
    start_seconds: float
    end_seconds: float


@dataclass
class StateClock:
    """Accumulates seconds per state; keeps every span while ``recording``."""

    recording: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: {MODEL: 0.0, WAIT: 0.0, HOST: 0.0})
    spans: list[Span] = field(default_factory=list)
    _state: str = HOST
    _mini_batch: int = -1
    _layer: int = -1
    _since: float = field(default_factory=time.perf_counter)

    def enter(self, state: str, mini_batch: int = -1, layer: int = -1) -> float:
        """Leave the present state for ``state`` and return the moment of change, in seconds."""
        now = time.perf_counter()
        self.seconds[self._state] += now - self._since
        if self.recording:
            self.spans.append(Span(self._state, self._mini_batch, self._layer, self._since, now))
        self._state, self._mini_batch, self._layer, self._since = state, mini_batch, layer, now
        return now

    def restart(self) -> None:
        """Begin counting anew, in the host state, from now."""
        self.seconds = {MODEL: 0.0, WAIT: 0.0, HOST: 0.0}
        self._state, self._mini_batch, self._layer, self._since = HOST, -1, -1, time.perf_counter()

    def snapshot(self) -> dict[str, float]:
        """Seconds per state up to now."""
        self.enter(self._state, self._mini_batch, self._layer)
        return dict(self.seconds)
