"""How long outputs turn out to be: bounded by max_tokens, sharpened by what has been seen to finish."""

from __future__ import annotations

import numpy as np

MIN_ENDED = 16
"""Outputs that must have stopped by themselves before they say anything about the others."""

GOLDEN = 0.6180339887498949
"""Multiples of it spread evenly between whole numbers, however many there are."""


class OutputLengths:
    """Kaplan–Meier estimate of the output length (Kaplan and Meier, 1958).

    An output cut at max_tokens says only that it would have been at least so long, and so does one that still runs:
    without these, the first to end would make all others look as short. With nothing but such outputs the expectation
    stays max_tokens, so fixed lengths are known exactly.
    """

    def __init__(self) -> None:
        self._ended = np.zeros(1, np.int64)
        self._cut = np.zeros(1, np.int64)
        self._num_ended = 0
        self._running = np.zeros(0, np.int64)
        self._survival_sums: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough outputs have stopped by themselves to say something about the others."""
        return self._num_ended >= MIN_ENDED

    def running(self, num_outputs: np.ndarray) -> None:
        """These still run, with ``num_outputs`` tokens so far, int64 [n]."""
        if self.is_known:
            self._running, self._survival_sums = np.bincount(num_outputs), None

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
        if not self.is_known:
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

    def drawn(self, num_outputs: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """Lengths as different as outputs are, one for each of ``num_outputs`` and ``max_tokens``; int64, the same at
        every call: what a crowd of them does, their expectations would not show."""
        if not self.is_known:
            return np.asarray(max_tokens, np.int64)
        survival, _ = self._curves()
        now = np.minimum(num_outputs, len(survival) - 1)
        parts = (np.arange(len(now)) * GOLDEN + 0.5) % 1.0
        lengths = np.searchsorted(-survival, -parts * survival[now], side="right")
        lengths = np.where(lengths >= len(survival), max_tokens, lengths)
        return np.clip(lengths, np.minimum(num_outputs + 1, max_tokens), max_tokens).astype(np.int64)

    def expected_area(self, num_prefill: int, num_outputs: int, max_tokens: int) -> float | None:
        """KV tokens that a sequence attends from its prompt's end on, by the survival curve; None while that says
        nothing. ``num_outputs``: tokens of its output that are part of the prompt."""
        if not self.is_known:
            return None
        survival, _ = self._curves()
        steps = np.arange(1, max_tokens - num_outputs)
        alive = survival[np.minimum(num_outputs + steps, len(survival) - 1)]
        now = survival[min(num_outputs, len(survival) - 1)]
        if now <= 1e-9:
            return None
        return float(alive @ (num_prefill + steps)) / now

    def _curves(self) -> tuple[np.ndarray, np.ndarray]:
        """survival[t]: probability of more than t tokens; sums[t]: its sum over 0…t-1."""
        if self._survival_sums is None:
            leaving = np.zeros(max(len(self._ended), len(self._running)))
            leaving[: len(self._ended)] = self._ended + self._cut
            leaving[: len(self._running)] += self._running
            at_risk = np.cumsum(leaving[::-1])[::-1]
            hazard = self._ended / np.maximum(at_risk[: len(self._ended)], 1)
            self._survival = np.cumprod(1 - hazard)
            self._survival_sums = np.concatenate([[0.0], np.cumsum(self._survival)])[:-1]
        return self._survival, self._survival_sums
