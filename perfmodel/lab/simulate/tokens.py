"""Simulated time, and the tokens of simulated requests: when they came, and as the scheduler reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Clock:
    """One clock for a world, its requests and its companions. ``now_seconds`` only grows.

    ``between_seconds``: what host work between two steps took since they were last taken: copies and drafts.
    """

    def __init__(self) -> None:
        self.now_seconds = self.between_seconds = 0.0

    def compute(self, seconds: float) -> None:
        """Let a step of so many seconds pass."""
        self.now_seconds += seconds

    def work(self, seconds: float) -> None:
        """Let so many seconds of work between two steps pass."""
        self.now_seconds += seconds
        self.between_seconds += seconds

    def wait_until(self, moment: float) -> None:
        """Let time pass in which nobody works; a moment that has passed changes nothing."""
        self.now_seconds = max(self.now_seconds, moment)

    def take_between_seconds(self) -> float:
        """Return the seconds between the last step and this one, and count from 0 again."""
        seconds, self.between_seconds = self.between_seconds, 0.0
        return seconds


class TokenTimes:
    """Every request's moments side by side in one array, so that a step of thousands is a few operations."""

    def __init__(self) -> None:
        self._seconds = np.zeros(0)
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._next = np.zeros(0, np.int64)
        self.total = 0

    def expect(self, output_lens: Sequence[int]) -> None:
        """More requests, numbered on, with so many tokens each."""
        ends = len(self._seconds) + np.cumsum(output_lens, dtype=np.int64)
        starts = ends - np.array(output_lens, np.int64)
        self._seconds = np.append(self._seconds, np.zeros(sum(output_lens)))
        self._starts, self._ends = np.append(self._starts, starts), np.append(self._ends, ends)
        self._next = np.append(self._next, starts)

    def take(self, request_ids: np.ndarray, now_seconds: float) -> np.ndarray:
        """One token for each of ``request_ids``, int64 [n], all different; returns those that have all of theirs."""
        places = self._next[request_ids]
        self._seconds[places] = now_seconds
        self._next[request_ids] = places + 1
        self.total += len(request_ids)
        return request_ids[places + 1 == self._ends[request_ids]]

    def add(self, counts: Mapping[int, int], now_seconds: float) -> None:
        """So many tokens for each request, but never its last one: ``take`` is to come after it."""
        for request_id, count in counts.items():
            start = self._next[request_id]
            end = min(start + count, self._ends[request_id] - 1)
            self._seconds[start:end] = now_seconds
            self._next[request_id] = end
            self.total += int(end - start)

    def count(self, request_id: int) -> int:
        """Return tokens that a request has."""
        return int(self._next[request_id] - self._starts[request_id])

    def of(self, request_id: int) -> np.ndarray:
        """Return the moments of a request's tokens, float64 [tokens so far]."""
        return self._seconds[self._starts[request_id] : self._next[request_id]]


class SimulatedOutput(Sequence[int]):
    """The output of a simulated sequence, as the scheduler reads it: as many zeros as tokens were counted.

    A run of thousands of sequences would otherwise append to as many lists in every step.
    """

    def __init__(self, tokens: TokenTimes, request_id: int) -> None:
        self._tokens, self._request_id = tokens, request_id

    def __len__(self) -> int:
        """Return tokens so far."""
        return self._tokens.count(self._request_id)

    def __getitem__(self, place: Any) -> Any:
        """Return a zero, or a new list of zeros."""
        return ([0] * len(self))[place]

    def __eq__(self, other: object) -> bool:
        """As lists compare."""
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]  # as a list's
