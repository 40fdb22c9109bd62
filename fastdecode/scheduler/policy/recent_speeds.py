"""How fast each R-worker is right now, for what costs nothing to take back: who attends of two that hold a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdecode.core.decayed import Decayed
from fastdecode.scheduler.store.workers import KEPT, LEAST_SECONDS, Workers

CHANGED = 1.2
"""An R-worker that is off its usual speed by more than this factor, beside the others, may have changed."""

NUM_STEPS = 3
"""One after the other in which it is, the same way, before what was usual is forgotten."""


class RecentSpeeds:
    """Follows a change at once, where :class:`Workers` takes some 20 steps, since placements outlast what passes."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._usual, self._new = Decayed(KEPT, 2, 0), np.zeros((2, 0))  # KV tokens, busy seconds
        self._ways = np.zeros(0, np.int64)

    @property
    def speeds(self) -> np.ndarray:
        """In any one unit, float64 [num_workers], none of them 0; as :class:`Workers` knows them while some that are
        present were hardly seen at work."""
        self._grow()
        tokens, seconds = self._usual.sums
        known = self._workers.speeds
        if (seconds[self._workers.present] < LEAST_SECONDS).any():
            return np.maximum(known, 1e-300)
        return np.maximum(np.where(seconds > 0, tokens / np.maximum(seconds, 1e-300), 0.0), 1e-300)

    def observe(self, kv_loads: Sequence[int], r_seconds: Sequence[float]) -> None:
        """One decode step: KV tokens attended and busy seconds of each R-worker."""
        self._grow()
        step = np.array([kv_loads, r_seconds], np.float64)
        seen = (step[0] > 0) & (step[1] > 0)
        self._note_changes(step, seen)
        self._usual.add(*step, where=seen)
        changed = (np.abs(self._ways) >= NUM_STEPS) & (self._new[1] >= LEAST_SECONDS)
        self._usual.sums[:, changed] = self._new[:, changed]
        self._ways[changed] = 0

    def forget(self, worker: int) -> None:
        """``worker`` has just joined, perhaps in the place of one that is gone."""
        self._grow()
        self._usual.forget(worker)
        self._ways[worker] = 0

    def _note_changes(self, step: np.ndarray, seen: np.ndarray) -> None:
        """Count for how many steps each R-worker has been faster (above 0) or slower (below) than usual, and sum these
        up. What slows all alike is no change."""
        compared = seen & (self._usual.sums[1] >= LEAST_SECONDS)
        if not compared.any():
            return
        ratios = np.ones(len(seen))
        now, usual = step[:, compared], self._usual.sums[:, compared]
        ratios[compared] = (now[0] / now[1]) / (usual[0] / usual[1])
        ratios[compared] /= np.median(ratios[compared])
        way = (ratios > CHANGED).astype(np.int64) - (ratios < 1 / CHANGED)
        goes_on = (way != 0) & (np.sign(self._ways) == way)
        self._new = np.where(goes_on, self._new, 0.0) + np.where(way != 0, step, 0.0)
        self._ways = np.where(goes_on, self._ways, 0) + way

    def _grow(self) -> None:
        if (more := len(self._workers) - len(self._ways)) > 0:
            self._usual.resize(len(self._workers))
            self._new, self._ways = np.pad(self._new, ((0, 0), (0, more))), np.pad(self._ways, (0, more))
