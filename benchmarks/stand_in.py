"""An R-worker that only takes time: zeros after a given delay, calls served one after another."""

from __future__ import annotations

import time

import numpy as np

from fastdecode.errors import BackendError
from fastdecode.types import WIRE_DTYPE, KVLayout, RWorkerInfo, StepPlan, StepReport, WorkerReport

TIMER_SECONDS = 2e-4


class StandInBackend:
    """``AttentionBackend`` whose every call is busy for ``call_seconds`` after the call before it, using no core."""

    def __init__(self, call_seconds: float = 0.0, block_size: int = 32) -> None:
        self.call_seconds = call_seconds
        self.block_size = block_size

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """See ``AttentionBackend.open``."""
        self.layout = layout
        return [RWorkerInfo("stand-in", 1 << 24, self.block_size, 1, "none", own_cores=True)]

    def begin_step(self, plan: StepPlan) -> None:
        """See ``AttentionBackend.begin_step``."""
        count = len(plan.workers[0].mini_batches)
        self._end: dict[int, float] = {}
        self._rows: dict[int, np.ndarray] = {}
        self._free_at = 0.0
        self._busy = np.zeros((2, count, len(self.layout.layers)))

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """See ``AttentionBackend.submit``."""
        start = max(time.perf_counter(), self._free_at)
        self._free_at = self._end[mini_batch] = start + self.call_seconds
        self._busy[:, mini_batch, layer] = start, self._free_at
        shape = (len(q), self.layout.layers[layer].num_heads, self.layout.layers[layer].value_head_dim)
        self._rows[mini_batch] = np.zeros(shape, WIRE_DTYPE[self.layout.model_dtype])

    def ready(self, mini_batch: int) -> bool:
        """See ``AttentionBackend.ready``."""
        return time.perf_counter() >= self._end[mini_batch]

    def collect(self, mini_batch: int) -> np.ndarray:
        """See ``AttentionBackend.collect``."""
        while (left := self._end[mini_batch] - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - TIMER_SECONDS))  # then spin: a timer may fire this much late
        return self._rows[mini_batch]

    def end_step(self) -> StepReport:
        """See ``AttentionBackend.end_step``."""
        return StepReport((WorkerReport(self._busy[0], self._busy[1], 0.0, 0, 1 << 24),))

    def abandon_step(self) -> None:
        """See ``AttentionBackend.abandon_step``."""

    def export(self, worker: int, sequence_id: int) -> np.ndarray:
        """Refused: see ``AttentionBackend.export``."""
        raise BackendError("export: the stand-in keeps no keys and values")

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """Refused: see ``AttentionBackend.import_``."""
        raise BackendError("import: the stand-in keeps no keys and values")

    def admit(self) -> list[RWorkerInfo]:
        """See ``AttentionBackend.admit``; nobody joins."""
        return []

    def dismiss(self, worker: int) -> None:
        """See ``AttentionBackend.dismiss``."""

    def close(self) -> None:
        """See ``AttentionBackend.close``."""
