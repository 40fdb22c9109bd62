"""Where the second copy of a sequence goes."""

from __future__ import annotations

import numpy as np

from fastdecode.scheduler.sequence import SequenceTable
from fastdecode.scheduler.worker_state import Workers

ALIKE = 0.05
"""Costs that differ by less than this part of their range count as equal."""


class CopyPlacement:
    """On another R-worker than its home, of another host where there is one; among those that cost least on the one
    that shares fewest sequences with the home: so what one R-worker has too much of can go on to any other.
    """

    def __init__(self, workers: Workers, table: SequenceTable, kv_replicas: int) -> None:
        self.is_wanted = kv_replicas > 1
        self._workers, self._table = workers, table

    def choose(self, home: int, could_hold: np.ndarray, num_blocks: int, costs: np.ndarray) -> int | None:
        """-1 where no other R-worker could ever hold it; None where none of those that could has room now.

        ``could_hold``: bool [num_workers]; ``num_blocks``: what it takes now; ``costs``: float64 [num_workers], as of
        ``placement_costs``.
        """
        if not self.is_wanted:
            return -1
        allowed = np.zeros(len(self._workers), bool)
        allowed[self._workers.accepting] = True
        allowed[home] = False
        allowed &= could_hold
        elsewhere = allowed & np.array([each.host != self._workers[home].host for each in self._workers])
        allowed = elsewhere if elsewhere.any() else allowed
        if not allowed.any():
            return -1
        able = np.flatnonzero(allowed & (num_blocks + self._workers.num_sequences <= self._workers.available))
        if not len(able):
            return None
        spread = float(np.ptp(costs[allowed]))
        best = able[costs[able] <= costs[able].min() + ALIKE * spread]
        return int(best[np.argmin(self._shared_with(home)[best])])

    def _shared_with(self, home: int) -> np.ndarray:
        """Sequences that each R-worker holds together with ``home``: int64 [num_workers]."""
        rows = self._table.rows
        homes, copies = self._table.workers[rows], self._table.copies[rows]
        partners = np.concatenate([copies[(homes == home) & (copies >= 0)], homes[copies == home]])
        return np.bincount(partners, minlength=len(self._workers))
