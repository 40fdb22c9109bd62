"""The pool: one attention backend over R-workers of any kind, which scatters q, k, v and gathers o."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fastdecode.cluster.local import row_counts, slices
from fastdecode.cluster.timing import transfer_seconds
from fastdecode.errors import BackendError
from fastdecode.types import (
    WIRE_DTYPE,
    KVLayout,
    LayerLayout,
    RWorkerInfo,
    StepPlan,
    StepReport,
    WorkerPlan,
    WorkerReport,
)


@dataclass(frozen=True)
class StepTimes:
    """What a worker says at the end of a step; the arrays as in ``WorkerReport``, on the S-worker's clock."""

    busy_start: np.ndarray
    busy_end: np.ndarray
    bytes_read: int
    blocks_free: int


class PoolWorker(Protocol):
    """One R-worker as the pool sees it. What takes a while is asked of all workers first and answered later.

    Refusals are ValueError or KeyError with the reason, and change nothing; BackendError names a worker that is lost.
    """

    name: str

    def open(self, layout: KVLayout) -> None:
        """Ask for caches for ``layout``."""
        ...

    def opened(self) -> RWorkerInfo:
        """The answer to ``open``; CapacityError when its memory is too small."""
        ...

    def begin_step(self, plan: WorkerPlan) -> None:
        """Ask for a step."""
        ...

    def begun(self) -> None:
        """The answer to ``begin_step``."""
        ...

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
        """Start one layer of one mini-batch with rows here; ``o`` is filled by the time ``wait`` returns."""
        ...

    def ready(self, mini_batch: int) -> bool:
        """True when ``wait`` would return at once."""
        ...

    def wait(self, mini_batch: int) -> None:
        """Wait for what was submitted for this mini-batch."""
        ...

    def end_step(self) -> None:
        """Ask to commit the step."""
        ...

    def ended(self) -> StepTimes:
        """The answer to ``end_step``."""
        ...

    def abandon_step(self) -> None:
        """Forget the step; no effect where none was begun, and no error where the worker is lost."""
        ...

    def export(self, sequence_id: int) -> np.ndarray:
        """See ``AttentionBackend.export``."""
        ...

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """See ``AttentionBackend.import_``."""
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...


@dataclass
class _MiniBatchRows:
    """The workers with rows in one mini-batch (index, worker, attending rows, all rows), and the o being filled."""

    busy: list[tuple[int, PoolWorker, slice, slice]]
    outputs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    current: np.ndarray | None = None
    layer: int = 0


class PoolBackend:
    """``AttentionBackend`` over R-workers of any kind."""

    def __init__(self, workers: Sequence[PoolWorker]) -> None:
        self.workers = list(workers)
        self._layers: tuple[LayerLayout, ...] = ()
        self._o_dtype: np.dtype = np.dtype(np.float32)
        self._rows: list[_MiniBatchRows] = []
        self._submitted, self._arrived = np.zeros((0, 0)), np.zeros((0, 0, 0))
        self._blocks: dict[str, tuple[int, int]] = {}

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """See ``AttentionBackend.open``."""
        self._layers, self._o_dtype = layout.layers, WIRE_DTYPE[layout.model_dtype]
        try:
            for worker in self.workers:
                worker.open(layout)
            infos = [worker.opened() for worker in self.workers]
        except BaseException:
            self.close()
            raise
        self._blocks = {info.name: (info.num_blocks, info.num_blocks) for info in infos}
        return infos

    def begin_step(self, plan: StepPlan) -> None:
        """See ``AttentionBackend.begin_step``."""
        try:
            for worker, part in zip(self.workers, plan.workers, strict=True):
                with self._refusals(worker, "the step's plan"):
                    worker.begin_step(part)
            for worker in self.workers:
                with self._refusals(worker, "the step's plan"):
                    worker.begun()
        except BaseException:
            self.abandon_step()
            raise
        num_mini_batches = len(plan.workers[0].mini_batches)
        self._rows = [self._mini_batch_rows(plan, mini_batch) for mini_batch in range(num_mini_batches)]
        self._submitted = np.zeros((num_mini_batches, len(self._layers)))
        self._arrived = np.zeros((len(self.workers), *self._submitted.shape))

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """See ``AttentionBackend.submit``."""
        self._submitted[mini_batch, layer] = time.perf_counter()
        rows = self._rows[mini_batch]
        rows.layer = layer
        o = rows.current = self._output(rows, layer, len(q))
        for _, worker, attending, all_rows in rows.busy:
            worker.submit(mini_batch, layer, q[attending], k[all_rows], v[all_rows], o[attending])

    def ready(self, mini_batch: int) -> bool:
        """See ``AttentionBackend.ready``."""
        return all(worker.ready(mini_batch) for _, worker, _, _ in self._rows[mini_batch].busy)

    def collect(self, mini_batch: int) -> np.ndarray:
        """See ``AttentionBackend.collect``."""
        rows = self._rows[mini_batch]
        if rows.current is None:
            raise BackendError(f"collect: mini-batch {mini_batch} was never submitted")
        for index, worker, _, _ in rows.busy:
            waits = not worker.ready(mini_batch)
            worker.wait(mini_batch)
            if waits:
                self._arrived[index, mini_batch, rows.layer] = time.perf_counter()
        return rows.current

    def end_step(self) -> StepReport:
        """See ``AttentionBackend.end_step``."""
        for worker in self.workers:
            worker.end_step()
        return StepReport(tuple(self._report(index) for index in range(len(self.workers))))

    def abandon_step(self) -> None:
        """See ``AttentionBackend.abandon_step``."""
        for worker in self.workers:
            worker.abandon_step()

    def export(self, worker: int, sequence_id: int) -> np.ndarray:
        """See ``AttentionBackend.export``."""
        holder = self._worker(worker, "export")
        with self._refusals(holder, "to export a sequence"):
            return holder.export(sequence_id)

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """See ``AttentionBackend.import_``."""
        holder = self._worker(worker, "import")
        with self._refusals(holder, "to import a sequence"):
            holder.import_(sequence_id, num_tokens, data)

    def close(self) -> None:
        """See ``AttentionBackend.close``."""
        for worker in self.workers:
            worker.close()
        self.workers = []

    @property
    def blocks_used(self) -> int:
        """Referenced blocks over all workers, as of the last step's end."""
        return sum(num_blocks - free for num_blocks, free in self._blocks.values())

    def _worker(self, index: int, what: str) -> PoolWorker:
        if not 0 <= index < len(self.workers):
            raise BackendError(f"{what}: there is no R-worker {index}; there are {len(self.workers)}")
        return self.workers[index]

    @contextmanager
    def _refusals(self, worker: PoolWorker, what: str) -> Iterator[None]:
        """Say as a BackendError which worker refused what."""
        try:
            yield
        except (ValueError, KeyError) as error:
            raise BackendError(f"R-worker {worker.name} refused {what}: {error.args[0]}") from error

    def _report(self, index: int) -> WorkerReport:
        worker = self.workers[index]
        with self._refusals(worker, "the end of the step"):
            times = worker.ended()
        self._blocks[worker.name] = (self._blocks[worker.name][0], times.blocks_free)
        transfer = transfer_seconds(self._submitted, times.busy_start, times.busy_end, self._arrived[index])
        return WorkerReport(times.busy_start, times.busy_end, transfer, times.bytes_read, times.blocks_free)

    def _mini_batch_rows(self, plan: StepPlan, mini_batch: int) -> _MiniBatchRows:
        counts = [row_counts(part.mini_batches[mini_batch]) for part in plan.workers]
        places = (slices([count[i] for count in counts]) for i in range(2))
        dealt = zip(range(len(counts)), self.workers, *places, strict=True)
        return _MiniBatchRows([each for each in dealt if each[-1].start < each[-1].stop])

    def _output(self, rows: _MiniBatchRows, layer: int, num_rows: int) -> np.ndarray:
        """The mini-batch's o buffer, one per head shape, reused by its layers."""
        shape = (self._layers[layer].num_heads, self._layers[layer].value_head_dim)
        if shape not in rows.outputs:
            rows.outputs[shape] = np.empty((num_rows, *shape), dtype=self._o_dtype)
        return rows.outputs[shape]
