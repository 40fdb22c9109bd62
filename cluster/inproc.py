"""R-workers as threads of this process: the attention backend for one machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.timing import transfer_seconds
from fastdecode.errors import BackendError, CapacityError
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
class InprocSettings:
    """``kv_cache_bytes`` is per worker. ``cores`` are dealt to the workers' threads in turn (empty: unpinned);
    ``own_cores`` says that the S-worker keeps off them."""

    num_workers: int
    kv_cache_bytes: int
    block_size: int
    num_threads: int
    cores: tuple[int, ...] = ()
    own_cores: bool = False


@dataclass
class _MiniBatchRows:
    """Where each worker's rows lie in the buffers of one mini-batch, and the o being filled."""

    attending: tuple[slice, ...]
    all_rows: tuple[slice, ...]
    outputs: dict[tuple[int, int], np.ndarray]
    current: np.ndarray | None = None


class InprocBackend:
    """``AttentionBackend`` over :class:`fastdecode._rworker.RWorker` objects, each with its own thread pool."""

    def __init__(self, settings: InprocSettings) -> None:
        self.settings = settings
        self.workers: list[_rworker.RWorker] = []
        self._layers: tuple[LayerLayout, ...] = ()
        self._o_dtype: np.dtype = np.dtype(np.float32)
        self._rows: list[_MiniBatchRows] = []
        self._submitted = np.zeros((0, 0))
        self._in_step: set[int] = set()

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """See ``AttentionBackend.open``."""
        self._layers, self._o_dtype = layout.layers, WIRE_DTYPE[layout.model_dtype]
        block_bytes = _rworker.block_bytes(_layer_tuples(layout), layout.kv_dtype, self.settings.block_size)
        num_blocks = self.settings.kv_cache_bytes // block_bytes
        if num_blocks < 1:
            raise CapacityError(
                f"a KV cache of {self.settings.kv_cache_bytes:,} bytes per R-worker holds not even one block of "
                f"{self.settings.block_size} tokens, which takes {block_bytes:,} bytes; give more --kv-cache-memory"
            )
        self.workers = [self._open_worker(layout, index, num_blocks) for index in range(self.settings.num_workers)]
        return [
            RWorkerInfo(
                f"inproc-{index}",
                worker.num_blocks,
                worker.block_size,
                worker.num_threads,
                worker.isa,
                self.settings.own_cores,
            )
            for index, worker in enumerate(self.workers)
        ]

    def begin_step(self, plan: StepPlan) -> None:
        """See ``AttentionBackend.begin_step``."""
        for index, (worker, part) in enumerate(zip(self.workers, plan.workers, strict=True)):
            try:
                worker.begin_step(_columns(part.controls), [_columns(spans) for spans in part.mini_batches])
                self._in_step.add(index)
            except Exception as error:
                self.abandon_step()
                raise BackendError(f"R-worker inproc-{index} refused the step's plan: {error}") from error
        num_mini_batches = len(plan.workers[0].mini_batches)
        self._rows = [_mini_batch_rows(plan.workers, mini_batch) for mini_batch in range(num_mini_batches)]
        self._submitted = np.zeros((num_mini_batches, len(self._layers)))

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """See ``AttentionBackend.submit``."""
        self._submitted[mini_batch, layer] = time.perf_counter()
        rows = self._rows[mini_batch]
        o = rows.current = self._output(rows, layer, len(q))
        for worker, attending, all_rows in zip(self.workers, rows.attending, rows.all_rows, strict=True):
            if all_rows.start < all_rows.stop:
                worker.submit(mini_batch, layer, q[attending], k[all_rows], v[all_rows], o[attending])

    def ready(self, mini_batch: int) -> bool:
        """See ``AttentionBackend.ready``."""
        return all(worker.ready(mini_batch) for worker in self._busy(mini_batch))

    def collect(self, mini_batch: int) -> np.ndarray:
        """See ``AttentionBackend.collect``."""
        for worker in self._busy(mini_batch):
            worker.wait(mini_batch)
        current = self._rows[mini_batch].current
        if current is None:
            raise BackendError(f"collect: mini-batch {mini_batch} was never submitted")
        return current

    def end_step(self) -> StepReport:
        """See ``AttentionBackend.end_step``."""
        return StepReport(tuple(self._report(index) for index in range(len(self.workers))))

    def abandon_step(self) -> None:
        """See ``AttentionBackend.abandon_step``."""
        for index in sorted(self._in_step):
            self._in_step.discard(index)
            self.workers[index].abandon_step()

    def export(self, worker: int, sequence_id: int) -> np.ndarray:
        """See ``AttentionBackend.export``."""
        with self._refusals(worker, "export"):
            return self.workers[worker].export(sequence_id)

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """See ``AttentionBackend.import_``."""
        with self._refusals(worker, "import"):
            self.workers[worker].import_(sequence_id, num_tokens, data)

    def close(self) -> None:
        """See ``AttentionBackend.close``."""
        for worker in self.workers:
            worker.close()
        self.workers = []
        self._in_step.clear()

    @property
    def blocks_used(self) -> int:
        """Referenced blocks over all workers."""
        return sum(worker.blocks_used for worker in self.workers)

    @contextmanager
    def _refusals(self, worker: int, what: str) -> Iterator[None]:
        """Say as a BackendError which worker refused what."""
        if not 0 <= worker < len(self.workers):
            raise BackendError(f"{what}: there is no R-worker {worker}; there are {len(self.workers)}")
        try:
            yield
        except (ValueError, KeyError) as error:
            raise BackendError(f"R-worker inproc-{worker} refused to {what} a sequence: {error.args[0]}") from error

    def _open_worker(self, layout: KVLayout, index: int, num_blocks: int) -> _rworker.RWorker:
        cores, threads = self.settings.cores, self.settings.num_threads
        first = index * threads
        return _rworker.RWorker(
            layers=_layer_tuples(layout),
            model_dtype=layout.model_dtype,
            kv_dtype=layout.kv_dtype,
            block_size=self.settings.block_size,
            num_blocks=num_blocks,
            num_threads=threads,
            cores=[cores[(first + i) % len(cores)] for i in range(threads)] if cores else [],
        )

    def _report(self, index: int) -> WorkerReport:
        busy_start, busy_end, bytes_read, blocks_free = self.workers[index].end_step()
        self._in_step.discard(index)
        transfer = transfer_seconds(self._submitted, busy_start, busy_end)
        return WorkerReport(busy_start, busy_end, transfer, bytes_read, blocks_free)

    def _busy(self, mini_batch: int) -> list[_rworker.RWorker]:
        rows = self._rows[mini_batch].all_rows
        return [worker for worker, own in zip(self.workers, rows, strict=True) if own.start < own.stop]

    def _output(self, rows: _MiniBatchRows, layer: int, num_rows: int) -> np.ndarray:
        """The mini-batch's o buffer, one per head shape, reused by its layers."""
        shape = (self._layers[layer].num_heads, self._layers[layer].value_head_dim)
        if shape not in rows.outputs:
            rows.outputs[shape] = np.empty((num_rows, *shape), dtype=self._o_dtype)
        return rows.outputs[shape]


def _layer_tuples(layout: KVLayout) -> list[tuple]:
    return [_layer_tuple(layer) for layer in layout.layers]


def _layer_tuple(layer: LayerLayout) -> tuple:
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.key_head_dim,
        layer.value_head_dim,
        layer.scale,
        layer.window,
        layer.soft_cap,
        list(layer.sinks),
    )


def _columns(records: np.ndarray) -> np.ndarray:
    """Records of four int64 fields as int64 [n, 4]."""
    return np.ascontiguousarray(records).view(np.int64).reshape(-1, 4)


def _mini_batch_rows(workers: Sequence[WorkerPlan], mini_batch: int) -> _MiniBatchRows:
    attending, all_rows = [], []
    attending_end = rows_end = 0
    for worker in workers:
        spans = worker.mini_batches[mini_batch]
        num_attending = int(spans["num_rows"][spans["attends"] != 0].sum())
        num_rows = int(spans["num_rows"].sum())
        attending.append(slice(attending_end, attending_end + num_attending))
        all_rows.append(slice(rows_end, rows_end + num_rows))
        attending_end, rows_end = attending_end + num_attending, rows_end + num_rows
    return _MiniBatchRows(tuple(attending), tuple(all_rows), {})
