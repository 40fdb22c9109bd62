"""How long outputs turn out to be: bounded by max_tokens, sharpened by what has been seen to finish."""

from __future__ import annotations

import numpy as np

MIN_ENDED = 16
"""Outputs that must have stopped by themselves before they say anything about the others."""


class OutputLengths:
    """Kaplan–Meier estimate of the output length (Kaplan and Meier, 1958).

    An output cut at max_tokens says only that it would have been at least so long; with nothing but such outputs the
    expectation stays max_tokens, so fixed lengths are known exactly.
    """

    def __init__(self) -> None:
        self._ended = np.zeros(1, np.int64)
        self._cut = np.zeros(1, np.int64)
        self._num_ended = 0
        self._survival_sums: np.ndarray | None = None

    def finished(self, num_outputs: int, was_cut: bool) -> None:
        """An output ended after ``num_outputs`` tokens; ``was_cut`` by max_tokens."""
        if num_outputs >= len(self._ended):
            room = num_outputs + 1 - len(self._ended)
            self._ended, self._cut = np.pad(self._ended, (0, room)), np.pad(self._cut, (0, room))
        (self._cut if was_cut else self._ended)[num_outputs] += 1
        if not was_cut:
            self._num_ended += 1
            self._survival_sums = None

    def expected(self, num_outputs: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """Expected tokens of outputs that have ``num_outputs`` now and end at ``max_tokens``; int64, rounded up.

        At least one more than now where more are allowed.
        """
        if self._num_ended < MIN_ENDED:
            return np.asarray(max_tokens, np.int64)
        survival, sums = self._curves()
        last = len(survival) - 1
        now, most = np.minimum(num_outputs, last), np.minimum(max_tokens, last)
        beyond = np.maximum(max_tokens - np.maximum(num_outputs, last), 0) * survival[last]
        more = (sums[most] - sums[now] + beyond) / np.maximum(survival[now], 1e-9)
        more = np.where(survival[now] > 1e-9, more, max_tokens - num_outputs)
        return np.clip(
            np.ceil(num_outputs + more - 1e-9).astype(np.int64), np.minimum(num_outputs + 1, max_tokens), max_tokens
        )

    def _curves(self) -> tuple[np.ndarray, np.ndarray]:
        """survival[t]: probability of more than t tokens; sums[t]: its sum over 0…t-1."""
        if self._survival_sums is None:
            leaving = self._ended + self._cut
            at_risk = np.cumsum(leaving[::-1])[::-1]
            self._survival = np.cumprod(1 - self._ended / np.maximum(at_risk, 1))
            self._survival_sums = np.concatenate([[0.0], np.cumsum(self._survival)])[:-1]
        return self._survival, self._survival_sums
