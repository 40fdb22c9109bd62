"""R-workers that only take time: zeros after a given delay, the calls of each served one after another."""

from __future__ import annotations

import time

import numpy as np

from fastdecode.core.types import WIRE_DTYPE, KVLayout, RWorkerInfo, StepPlan, StepReport, WorkerReport
from fastdecode.measure.decode_rig import InstantBackend

TIMER_SECONDS = 2e-4
NUM_BLOCKS = 1 << 24


class StandInBackend(InstantBackend):
    """``AttentionBackend`` whose R-workers use no core.

    Each is busy for ``call_seconds``, and ``seconds_per_token`` for every cached token that it attends, after its call
    before; o is there when the last of them is done.
    """

    def __init__(
        self,
        call_seconds: float = 0.0,
        block_size: int = 32,
        num_workers: int = 1,
        seconds_per_token: float = 0.0,
    ) -> None:
        super().__init__(block_size)
        self.call_seconds = call_seconds
        self.num_workers = num_workers
        self.seconds_per_token = seconds_per_token

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        self.layout = layout
        info = RWorkerInfo("stand-in", NUM_BLOCKS, self._block_size, 1, "none", own_cores=True)
        return [info] * self.num_workers

    def begin_step(self, plan: StepPlan) -> None:
        tokens = [[_attended(spans) for spans in worker.mini_batches] for worker in plan.workers]
        self._tokens = np.array(tokens, np.float64)
        self._end: dict[int, float] = {}
        self._rows: dict[int, np.ndarray] = {}
        self._free_at = np.zeros(self.num_workers)
        self._busy = np.zeros((2, *self._tokens.shape, len(self.layout.layers)))

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        tokens = self._tokens[:, mini_batch]
        start = np.maximum(time.perf_counter(), self._free_at)
        end = start + (self.call_seconds + self.seconds_per_token * tokens) * (tokens > 0)
        self._free_at = end
        self._end[mini_batch] = float(end.max())
        self._busy[:, :, mini_batch, layer] = np.where(tokens > 0, (start, end), 0.0)
        shape = (len(q), self.layout.layers[layer].num_heads, self.layout.layers[layer].value_head_dim)
        self._rows[mini_batch] = np.zeros(shape, WIRE_DTYPE[self.layout.model_dtype])

    def ready(self, mini_batch: int) -> bool:
        return time.perf_counter() >= self._end[mini_batch]

    def collect(self, mini_batch: int) -> np.ndarray:
        while (left := self._end[mini_batch] - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - TIMER_SECONDS))  # then spin: a timer may fire this much late
        return self._rows[mini_batch]

    def end_step(self) -> StepReport:
        start, end = self._busy
        return StepReport(tuple(WorkerReport(*times, 0.0, 0, NUM_BLOCKS) for times in zip(start, end, strict=True)))


def _attended(spans: np.ndarray) -> int:
    """Cached tokens that a mini-batch's SPAN records attend on one R-worker."""
    return int(((spans["context_len"] + spans["num_rows"]) * (spans["mode"] > 0)).sum())
