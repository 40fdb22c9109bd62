"""Estimates of output lengths, and of how long a run still takes with and without spread starts."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

MIN_ENDED = 16
"""Number of outputs that must have stopped before max_tokens before the estimate is used."""

SAMPLE = 512
"""Most waiting requests that are examined. In longer queues, every n-th stands for n requests; n is a power of two."""


class OutputLengths:
    """Kaplan–Meier estimate of the output length (Kaplan and Meier, 1958).
    Outputs that were cut at max_tokens, or still grow, are lower bounds. Without them, all outputs would seem as short
    as the first ones to end. Until ``MIN_ENDED`` outputs have stopped before max_tokens, max_tokens is expected, which
    is exact for fixed lengths.
    """

    def __init__(self) -> None:
        self._ended = np.zeros(1, np.int64)
        self._cut = np.zeros(1, np.int64)
        self._num_ended = 0
        self._running = np.zeros(0, np.int64)
        self._survival_sums: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        """True if enough outputs have stopped before max_tokens to estimate other outputs."""
        return self._num_ended >= MIN_ENDED

    def running(self, num_outputs: np.ndarray) -> None:
        """Replace the counts of running sequences. ``num_outputs``: output tokens that each has now, int64 [n]."""
        if self.is_known:
            self._running, self._survival_sums = np.bincount(num_outputs), None

    def finished(self, num_outputs: int, was_cut: bool) -> None:
        """Count an output that ended after ``num_outputs`` tokens. ``was_cut``: max_tokens ended it."""
        if num_outputs >= len(self._ended):
            room = num_outputs + 1 - len(self._ended)
            self._ended, self._cut = np.pad(self._ended, (0, room)), np.pad(self._cut, (0, room))
        (self._cut if was_cut else self._ended)[num_outputs] += 1
        if not was_cut:
            self._num_ended += 1
            self._survival_sums = None

    def expected(self, num_outputs: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """Return the expected final lengths of outputs that have ``num_outputs`` tokens now, at most ``max_tokens``.
        The result is int64, rounded up, and above ``num_outputs`` unless that is the limit.
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
        """Return plausible final lengths, int64, of outputs that have ``num_outputs`` tokens now; always the same ones.
        They vary like real outputs, so they show the behaviour of many requests better than the mean does.
        """
        if not self.is_known:
            return np.asarray(max_tokens, np.int64)
        survival, _ = self._curves()
        now = np.minimum(num_outputs, len(survival) - 1)
        # Multiples of the golden ratio, modulo 1, are evenly spread, however many there are
        golden = 0.6180339887498949
        parts = (np.arange(len(now)) * golden + 0.5) % 1.0
        lengths = np.searchsorted(-survival, -parts * survival[now], side="right")
        lengths = np.where(lengths >= len(survival), max_tokens, lengths)
        return np.clip(lengths, np.minimum(num_outputs + 1, max_tokens), max_tokens).astype(np.int64)

    def expected_area(self, num_prefill: int, num_outputs: int, max_tokens: int) -> float | None:
        """Return the KV tokens that a sequence is expected to attend after its prompt, summed over its decode steps.
        Return None while lengths are unknown. ``num_outputs``: output tokens that ``num_prefill`` includes.
        """
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
        """Return (survival, sums): survival[t] is the probability of over t tokens; sums[t] adds up survival[:t]."""
        if self._survival_sums is None:
            leaving = np.zeros(max(len(self._ended), len(self._running)))
            leaving[: len(self._ended)] = self._ended + self._cut
            leaving[: len(self._running)] += self._running
            at_risk = np.cumsum(leaving[::-1])[::-1]
            hazard = self._ended / np.maximum(at_risk[: len(self._ended)], 1)
            self._survival = np.cumprod(1 - hazard)
            self._survival_sums = np.concatenate([[0.0], np.cumsum(self._survival)])[:-1]
        return self._survival, self._survival_sums


@dataclass(frozen=True, eq=False)
class Outlook:
    """The known and expected rest of a run, in steps and KV tokens.
    ``loads``: KV tokens of running sequences, float64 [steps]. ``ends``: steps until each running sequence ends, int64
    [n]. ``num_prefill``, ``decode_steps``: of waiting requests in order, int64 [m], each standing for ``weight``
    requests; unknown lengths are drawn. ``seats``: most running sequences. ``limit``: the load at which R-workers take
    as long as the S-worker. ``idle_share``: the S-worker's time for an almost empty step divided by that for a full
    step; in between, it is linear.
    """

    loads: np.ndarray
    ends: np.ndarray
    num_prefill: np.ndarray
    decode_steps: np.ndarray
    weight: int
    seats: int
    limit: float
    idle_share: float

    @property
    def together(self) -> float:
        """Time until all requests have ended if each starts as soon as ``seats`` allow.
        The unit is the time of the S-worker for a full step.
        """
        return self._seconds(np.zeros(len(self.decode_steps)))

    @property
    def spread(self) -> float:
        """Time until all requests have ended if their starts are spread; the unit is that of ``together``."""
        areas = self.weight * (self.num_prefill * self.decode_steps + self.decode_steps * (self.decode_steps + 1) // 2)
        return self._seconds((np.cumsum(areas) - areas) / self.limit)

    def _seconds(self, earliest: np.ndarray) -> float:
        starts = self._starts(earliest)
        ends = starts + self.decode_steps
        horizon = int(max(ends.max(initial=0), len(self.loads), self.ends.max(initial=0))) + 1
        load = np.zeros(horizon)
        load[: len(self.loads)] = self.loads
        growth = np.bincount(starts, minlength=horizon) - np.bincount(ends, minlength=horizon)
        jumps = np.bincount(starts, self.num_prefill + 1, horizon)
        jumps -= np.bincount(ends, self.num_prefill + 1 + self.decode_steps, horizon)
        rising = np.concatenate([[0], np.cumsum(growth)[:-1]])
        load += self.weight * np.cumsum(jumps + rising)
        rows = self.weight * np.cumsum(growth) + len(self.ends) - np.cumsum(np.bincount(self.ends, minlength=horizon))
        s_part = self.idle_share + (1 - self.idle_share) * rows / self.seats
        busy = (rows > 0) | (load > 0.5)
        return float(np.maximum(s_part, load / self.limit)[busy].sum())

    def _starts(self, earliest: np.ndarray) -> np.ndarray:
        free = np.zeros(max(0, self.seats - len(self.ends)), np.int64)
        seats = np.sort(np.append(free, self.ends))[:: self.weight].tolist()  # as heapq needs: a sorted list is a heap
        starts, before = [], 0
        for paid_at, steps in zip(np.ceil(earliest).astype(int).tolist(), self.decode_steps.tolist(), strict=True):
            before = max(before, paid_at, seats[0])
            heapq.heapreplace(seats, before + steps)
            starts.append(before)
        return np.array(starts, np.int64)
