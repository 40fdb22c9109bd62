"""R-workers called without a model, to time their attention, their steps and the link."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.core.dtypes import to_wire
from fastdecode.core.machine import usable_cores
from fastdecode.core.types import CONTROL, SPAN, StepPlan, Verb, WorkerPlan
from fastdecode.engine.compose.backends import make_backend
from fastdecode.kinds.layout import KVLayout

NO_CONTROLS = np.zeros(0, CONTROL)
NO_SPANS = np.zeros(0, SPAN)


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one step: to begin and end it, and each layer's R-worker time and link time, float64 [num_layers]."""

    plan_seconds: float
    busy_seconds: np.ndarray
    link_seconds: np.ndarray


class AttentionRig:
    """The R-workers of ``config``, the first of which attends to sequences of random keys and values."""

    def __init__(self, config: EngineConfig, layout: KVLayout, seed: int = 0) -> None:
        self.layout = layout
        self.backend = make_backend(config, config.r_core_list or usable_cores())
        self.r_workers = self.backend.open(layout)
        self._rng = np.random.default_rng(seed)
        self._held: list[int] = []
        self._context_len = 0
        self._exported = np.zeros(0, np.uint8)

    def fill(self, num_sequences: int, context_len: int) -> None:
        """Replace the cache's content by ``num_sequences`` random sequences of ``context_len`` tokens each."""
        self._release()
        self._append(0, context_len)
        exported = self.backend.export(0, 0)
        for sequence_id in range(1, num_sequences):
            self.backend.import_(0, sequence_id, context_len, exported)
        self._held, self._context_len = list(range(num_sequences)), context_len
        self._payload = [self._random(num_sequences, layer) for layer in range(len(self.layout.layers))]

    def rewind(self, context_len: int) -> None:
        """Shorten every sequence to ``context_len`` tokens again, which drops the tokens of later steps."""
        controls = np.array([(Verb.TRUNCATE, each, 0, context_len) for each in self._held], CONTROL)
        self.backend.begin_step(self._plan(NO_SPANS, controls))
        self.backend.end_step()
        self._context_len = context_len

    def step(self, pause_seconds: float = 0.0) -> CallTimes:
        """Run a step with one token per sequence, pausing ``pause_seconds`` before each layer; return its times."""
        num_layers = len(self.layout.layers)
        trips = np.zeros(num_layers)
        begin = time.perf_counter()
        self.backend.begin_step(self._plan(self._spans([(i, self._context_len, 1, 1) for i in self._held])))
        plan_seconds = time.perf_counter() - begin
        for layer, payload in enumerate(self._payload):
            start = _busy_until(time.perf_counter() + pause_seconds)
            self.backend.submit(0, layer, *payload)
            self.backend.collect(0)
            trips[layer] = time.perf_counter() - start
        end = time.perf_counter()
        report = self.backend.end_step().workers[0]
        plan_seconds += time.perf_counter() - end
        self._context_len += 1
        busy = (report.busy_end - report.busy_start)[0]
        return CallTimes(plan_seconds, busy, trips - busy)

    def close(self) -> None:
        """Free the R-workers."""
        self.backend.close()

    def _append(self, sequence_id: int, num_tokens: int) -> None:
        # Tokens appended in one step while the cache is filled
        chunk_rows = 2048
        for begin in range(0, num_tokens, chunk_rows):
            rows = min(chunk_rows, num_tokens - begin)
            self.backend.begin_step(self._plan(self._spans([(sequence_id, begin, rows, 0)])))
            for layer in range(len(self.layout.layers)):
                q, k, v = self._random(rows, layer)
                self.backend.submit(0, layer, q[:0], k, v)
                self.backend.collect(0)
            self.backend.end_step()

    def _release(self) -> None:
        controls = np.array([(Verb.RELEASE, sequence_id, 0, 0) for sequence_id in self._held], CONTROL)
        self.backend.begin_step(self._plan(NO_SPANS, controls))
        self.backend.end_step()
        self._held = []

    def _plan(self, spans: np.ndarray, controls: np.ndarray = NO_CONTROLS) -> StepPlan:
        idle = WorkerPlan(NO_CONTROLS, (NO_SPANS,))
        return StepPlan((WorkerPlan(controls, (spans,)), *[idle] * (len(self.r_workers) - 1)))

    def _random(self, num_rows: int, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, k, v = (
            to_wire(self._rng.standard_normal((num_rows, *shape), dtype=np.float32), self.layout.model_dtype)
            for shape in self.layout.layers[layer].row_shapes[:3]
        )
        return q, k, v

    @staticmethod
    def _spans(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
        return np.array(rows, SPAN)


def _busy_until(moment: float) -> float:
    """Busy-wait until the time ``moment``, since a sleeping thread would start slowly; return the present time."""
    while (now := time.perf_counter()) < moment:
        pass
    return now
