"""An R-worker that can be checked by hand: it answers each query with the query's own label, row by row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastdecode.cluster.pool.routed_rows import Arrays
from fastdecode.cluster.pool.worker import PoolWorker
from fastdecode.core.errors import WorkerLostError
from fastdecode.core.routes import node_widths
from fastdecode.core.types import RWorkerInfo, SpanMode, WorkerPlan, WorkerReport
from fastdecode.kinds.layout import KVLayout


class Kept(NamedTuple):
    """A stored row: its sequence, its position, and the labels of its key and value."""

    sequence_id: int
    position: int
    key: float
    value: float


class LabellingWorker(PoolWorker):
    """A ``PoolWorker`` over rows whose elements all equal one number, their label. Merging gives the query's label.
    ``kept``: stored rows in order. ``asked``: (sequence id, label) of each attending row. It is lost at call
    ``last_call``.
    """

    def __init__(self, name: str, last_call: int = 1 << 60) -> None:
        self.name = name
        self.kept: list[Kept] = []
        self.asked: list[tuple[int, float]] = []
        self._calls_left = last_call

    def open(self, layout: KVLayout) -> None:
        self._num_layers = len(layout.layers)

    def opened(self) -> RWorkerInfo:
        return RWorkerInfo(self.name, 1, 32, 1, "scalar", True)

    def begin_step(self, plan: WorkerPlan) -> None:
        self._live()
        self._plan = plan

    def begun(self) -> None:
        self._live()

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        self._live()
        q, k, v, o, partials = arrays
        queries, stored, outputs, parts = (iter(each) for each in (q, zip(k, v, strict=True), o, _rows(partials)))
        for sequence_id, context_len, num_rows, mode in self._plan.mini_batches[mini_batch].tolist():
            for i in range(num_rows):
                if mode != SpanMode.READ:
                    self.kept.append(Kept(sequence_id, context_len + i, *(_label(each) for each in next(stored))))
                if mode == SpanMode.APPEND:
                    continue
                self.asked.append((sequence_id, label := _label(next(queries))))
                if mode == SpanMode.ATTEND:
                    next(outputs)[:] = label
                    continue
                num_parts = 1 if mode == SpanMode.READ else len(node_widths(context_len + num_rows))
                for _ in range(num_parts):
                    part = next(parts)
                    part[:, :2], part[:, 2:] = (0.0, 1.0), label
        if any(next(each, None) is not None for each in (queries, stored, outputs, parts)):
            raise ValueError("more rows than the plan has")

    def ready(self, mini_batch: int) -> bool:
        self._live()
        return True

    def wait(self, mini_batch: int) -> None:
        self._live()

    def end_step(self) -> None:
        self._live()

    def ended(self) -> WorkerReport:
        self._live()
        never = np.zeros((len(self._plan.mini_batches), self._num_layers))
        return WorkerReport(never, never, 0.0, 0, 1)

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        raise ValueError("it has labels only")

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        raise ValueError("it has labels only")

    def _live(self) -> None:
        self._calls_left -= 1
        if self._calls_left <= 0:
            raise WorkerLostError(f"R-worker {self.name} is lost")


def _rows(partials: np.ndarray | None) -> np.ndarray:
    return np.zeros((0, 1, 3), np.float32) if partials is None else partials


def _label(row: np.ndarray) -> float:
    """Return the one number that all elements equal."""
    (label,) = set(row.ravel().tolist())
    return float(label)
