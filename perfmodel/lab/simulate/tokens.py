"""Simulated time, and the tokens of simulated requests: their times, and their form for the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Clock:
    """The simulated time of a world, its requests, its drafter and prefill workers. ``now_seconds`` only grows.

    ``between_seconds``: host work (copies and drafts) since the last call of ``take_between_seconds``.
    """

    def __init__(self) -> None:
        self.now_seconds = self.between_seconds = 0.0

    def compute(self, seconds: float) -> None:
        """Let the ``seconds`` of a step pass."""
        self.now_seconds += seconds

    def work(self, seconds: float) -> None:
        """Let ``seconds`` of host work between two steps pass."""
        self.now_seconds += seconds
        self.between_seconds += seconds

    def wait_until(self, moment: float) -> None:
        """Let idle time pass; a past moment changes nothing."""
        self.now_seconds = max(self.now_seconds, moment)

    def take_between_seconds(self) -> float:
        """Return the seconds of host work between the last step and this one, and restart them from 0."""
        seconds, self.between_seconds = self.between_seconds, 0.0
        return seconds


class TokenTimes:
    """The token times of all requests in one array, so that a step takes few operations for thousands of sequences."""

    def __init__(self) -> None:
        self._seconds = np.zeros(0)
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._next = np.zeros(0, np.int64)
        self.total = 0

    def expect(self, output_lens: Sequence[int]) -> None:
        """Add requests of ``output_lens`` tokens, numbered in order after those added before."""
        ends = len(self._seconds) + np.cumsum(output_lens, dtype=np.int64)
        starts = ends - np.array(output_lens, np.int64)
        self._seconds = np.append(self._seconds, np.zeros(sum(output_lens)))
        self._starts, self._ends = np.append(self._starts, starts), np.append(self._ends, ends)
        self._next = np.append(self._next, starts)

    def take(self, request_ids: np.ndarray, now_seconds: float) -> np.ndarray:
        """Add one token for each of ``request_ids``, int64 [n], all different; return the complete requests."""
        places = self._next[request_ids]
        self._seconds[places] = now_seconds
        self._next[request_ids] = places + 1
        self.total += len(request_ids)
        return request_ids[places + 1 == self._ends[request_ids]]

    def add(self, counts: Mapping[int, int], now_seconds: float) -> None:
        """Add ``counts`` tokens to each request, but never a request's last token, which ``take`` adds."""
        for request_id, count in counts.items():
            start = self._next[request_id]
            end = min(start + count, self._ends[request_id] - 1)
            self._seconds[start:end] = now_seconds
            self._next[request_id] = end
            self.total += int(end - start)

    def count(self, request_id: int) -> int:
        """Return the number of a request's tokens."""
        return int(self._next[request_id] - self._starts[request_id])

    def of(self, request_id: int) -> np.ndarray:
        """Return the times of a request's tokens, float64 [tokens so far]."""
        return self._seconds[self._starts[request_id] : self._next[request_id]]


class SimulatedOutput(Sequence[int]):
    """The output of a simulated sequence for the scheduler: as many zeros as tokens were counted.

    Real lists would have to be appended to, thousands of them in every step.
    """

    def __init__(self, tokens: TokenTimes, request_id: int) -> None:
        self._tokens, self._request_id = tokens, request_id

    def __len__(self) -> int:
        return self._tokens.count(self._request_id)

    def __getitem__(self, place: Any) -> Any:
        return ([0] * len(self))[place]

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` equals the list of zeros that this output stands for."""
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]  # as a list's
