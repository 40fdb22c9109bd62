"""Whether it pays to spread starts: the rest of a run foreseen twice, with and without."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

SAMPLE = 512
"""Waiting requests that are looked at; of longer queues every n-th stands for n, a power of two."""


@dataclass(frozen=True, eq=False)
class Outlook:
    """What is known of the rest of a run, in steps and KV tokens.

    ``loads``: of those that run, float64 [steps]. ``ends``: in how many steps each of them ends, int64 [n].
    ``num_prefill`` and ``decode_steps``: of waiting requests in their order, int64 [m], each standing for ``weight``;
    where lengths are unknown, as different as they are.
    ``seats``: sequences that run at most. ``limit``: the load at which R time equals S time. ``idle_share``: S time of
    a step with hardly any row over that of one with all seats taken; in between it is a straight line.
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
        """From now until all have ended, in full S-parts, if each request starts as soon as it has a seat."""
        return self._seconds(np.zeros(len(self.decode_steps)))

    @property
    def spread(self) -> float:
        """The same if starts are paid for by the limit, step by step."""
        areas = self.weight * (self.num_prefill * self.decode_steps + self.decode_steps * (self.decode_steps + 1) // 2)
        return self._seconds((np.cumsum(areas) - areas) / self.limit)

    def _seconds(self, earliest: np.ndarray) -> float:
        """Request i starts when it has a seat, not before ``earliest[i]``, and not before those in front of it."""
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
        """int64 [m]."""
        free = np.zeros(max(0, self.seats - len(self.ends)), np.int64)
        seats = np.sort(np.append(free, self.ends))[:: self.weight].tolist()  # sorted lists are heaps
        starts, before = [], 0
        for paid_at, steps in zip(np.ceil(earliest).astype(int).tolist(), self.decode_steps.tolist(), strict=True):
            before = max(before, paid_at, seats[0])
            heapq.heapreplace(seats, before + steps)
            starts.append(before)
        return np.array(starts, np.int64)
