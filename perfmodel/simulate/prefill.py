"""Prefill workers in simulated time."""

from __future__ import annotations

import heapq
import math

from fastdecode.core.remote_prefill import RemotePrefill
from fastdecode.perfmodel.partition import Forecast


class PrefillFleet:
    """Computes prompts as ``forecast`` says; each worker takes its parts in the order they were handed out."""

    def __init__(self, forecast: Forecast, num_workers: int) -> None:
        """``num_workers`` of equal speed."""
        self.forecast, self.num_workers = forecast, num_workers
        self.busy_seconds = 0.0
        self.num_prompts = 0
        self._free = [0.0] * num_workers
        self._ends: list[tuple[float, int]] = []

    def submit(self, prefill: RemotePrefill, now_seconds: float) -> None:
        """Begin a prompt once all its workers are free."""
        rows = [part.end - part.start for part in prefill.parts]
        start = max(now_seconds, *(self._free[part.worker] for part in prefill.parts))
        ends = self.forecast.seconds(rows, [1.0] * len(rows), prefill.context_len)
        for part, seconds in zip(prefill.parts, ends, strict=True):
            self._free[part.worker] = start + seconds
            self.busy_seconds += seconds
        self.num_prompts += 1
        heapq.heappush(self._ends, (self._free[prefill.parts[-1].worker], prefill.job_id))

    def take(self, now_seconds: float) -> list[int]:
        """Jobs that have ended by now, in order."""
        ended = []
        while self._ends and self._ends[0][0] <= now_seconds:
            ended.append(heapq.heappop(self._ends)[1])
        return ended

    @property
    def next_seconds(self) -> float:
        """When the next prompt ends; infinite where none is under way."""
        return self._ends[0][0] if self._ends else math.inf
