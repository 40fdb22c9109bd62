"""Finding the KV load at which R time equals S time, from the first decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_STEPS = 20
"""Decode steps that are measured."""


class BalanceFinder:
    """Measures the first decode steps, and again whenever the batch has doubled since: S time depends on it."""

    def __init__(self) -> None:
        self._begin(0)

    def observe(
        self, num_rows: int, kv_loads: Sequence[int], s_seconds: float, r_seconds: Sequence[float]
    ) -> int | None:
        """One decode step of ``num_rows``: KV tokens attended and busy seconds of each R-worker, S-worker's seconds.

        Returns, after the last step of a measurement, the KV tokens per step that one R-worker attends in S time.
        """
        if num_rows >= 2 * self._num_rows:
            self._begin(num_rows)
        busiest = int(np.argmax(r_seconds))
        if len(self._s_seconds) == NUM_STEPS or r_seconds[busiest] <= 0:  # nobody was seen at work
            return None
        self._s_seconds.append(s_seconds)
        self._kv_loads.append(kv_loads[busiest])
        self._r_seconds.append(r_seconds[busiest])
        return self._balanced_kv_tokens() if len(self._s_seconds) == NUM_STEPS else None

    def _begin(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._s_seconds: list[float] = []
        self._kv_loads: list[float] = []
        self._r_seconds: list[float] = []

    def _balanced_kv_tokens(self) -> int:
        """R time is a fixed part and one per token. A line through the steps separates them where loads differ; it may
        call at most half of the R time fixed, since over nearly equal loads its slope is noise."""
        loads, seconds = np.array(self._kv_loads), np.array(self._r_seconds)
        mean_load, mean_seconds = loads.mean(), float(np.median(seconds))
        ratio = mean_seconds / mean_load
        slope = ratio if np.ptp(loads) < 0.1 * mean_load else float(np.polyfit(loads, seconds, 1)[0])
        per_token = min(max(slope, ratio / 2), ratio)
        fixed = mean_seconds - per_token * mean_load
        return int(max(0.0, float(np.median(self._s_seconds)) - fixed) / per_token)
