"""How fast each R-worker attends, as far as anybody knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KEPT = 0.95
"""What of the past counts after another step: about the last 20 steps do."""

AT_WORK = 0.25
"""An R-worker busy for less than this part of the busiest one's time, over less than this part of the most loaded one's
tokens, tells too little about itself."""

LEAST_SECONDS = 0.05
"""Busy time, among what counts of the past, that it takes to say anything: shorter calls are fixed costs and chance."""

TOLERANCE = 1.2
"""Speeds whose proportions are as expected within this factor count as expected: placement does not follow chance."""


class WorkerSpeeds:
    """First in proportion to what memory gave each R-worker at its start, then as steps showed.

    A start cannot show who will share the cores: two R-workers on one core, one with twice the other's weight, or a
    neighbour that comes and goes. Busy seconds hold what the others took.
    """

    def __init__(self, bandwidths: Sequence[float]) -> None:
        self._bandwidths = np.array(bandwidths, float)
        self._kv_tokens, self._seconds = np.zeros((2, len(bandwidths)))

    def join(self, bandwidth: float) -> None:
        """One more R-worker, next in number."""
        self._bandwidths = np.append(self._bandwidths, bandwidth)
        self._kv_tokens, self._seconds = (np.append(each, 0.0) for each in (self._kv_tokens, self._seconds))

    def observe(self, kv_loads: Sequence[int], r_seconds: Sequence[float]) -> None:
        """One decode step: KV tokens attended and busy seconds of each R-worker."""
        seconds, tokens = np.array(r_seconds), np.array(kv_loads)
        seen = (seconds >= AT_WORK * seconds.max()) | (tokens >= AT_WORK * tokens.max())
        seen &= seconds > 0
        for total, new in ((self._kv_tokens, tokens), (self._seconds, seconds)):
            total[seen] = KEPT * total[seen] + new[seen]

    @property
    def relative(self) -> np.ndarray:
        """Speeds in one unit, whichever; float64 [num_workers]. Of those never seen, in proportion to bandwidth."""
        seen = self._seconds >= LEAST_SECONDS
        if not seen.any():
            return self._bandwidths
        speeds = np.where(seen, self._kv_tokens / np.where(seen, self._seconds, 1.0), 0.0)
        surprise = speeds[seen] / self._bandwidths[seen]
        if surprise.max() <= TOLERANCE * surprise.min():
            return self._bandwidths
        return np.where(seen, speeds, self._bandwidths * speeds.sum() / self._bandwidths[seen].sum())
