"""R-workers as threads of this process: the pool for one machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.local import RWorkerSize, begin_step, make_rworker
from fastdecode.cluster.pool import PoolBackend
from fastdecode.cluster.pool_worker import StepTimes
from fastdecode.types import KVLayout, RWorkerInfo, WorkerPlan


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

    def size(self, index: int) -> RWorkerSize:
        """Memory, threads and cores of worker ``index``."""
        first = index * self.num_threads
        cores = [self.cores[(first + i) % len(self.cores)] for i in range(self.num_threads)] if self.cores else []
        return RWorkerSize(self.kv_cache_bytes, self.num_threads, tuple(cores))


class InprocBackend(PoolBackend):
    """``AttentionBackend`` over :class:`fastdecode._rworker.RWorker` objects, each with its own thread pool."""

    def __init__(self, settings: InprocSettings) -> None:
        super().__init__([InprocWorker(settings, index) for index in range(settings.num_workers)])


class InprocWorker:
    """``PoolWorker`` over one C++ R-worker: every answer is there at once."""

    def __init__(self, settings: InprocSettings, index: int) -> None:
        self.name = f"inproc-{index}"
        self._settings, self._index = settings, index
        self._worker: _rworker.RWorker | None = None
        self._in_step = False

    def open(self, layout: KVLayout) -> None:
        """See ``PoolWorker.open``."""
        self._worker = make_rworker(layout, self._settings.block_size, self._settings.size(self._index))

    def opened(self) -> RWorkerInfo:
        """See ``PoolWorker.opened``."""
        worker = self._open
        return RWorkerInfo(
            self.name,
            worker.num_blocks,
            worker.block_size,
            worker.num_threads,
            worker.isa,
            self._settings.own_cores,
        )

    def begin_step(self, plan: WorkerPlan) -> None:
        """See ``PoolWorker.begin_step``."""
        begin_step(self._open, plan)
        self._in_step = True

    def begun(self) -> None:
        """See ``PoolWorker.begun``."""

    def end_step(self) -> None:
        """See ``PoolWorker.end_step``."""

    def ended(self) -> StepTimes:
        """See ``PoolWorker.ended``."""
        times = StepTimes(*self._open.end_step())
        self._in_step = False
        return times

    def abandon_step(self) -> None:
        """See ``PoolWorker.abandon_step``."""
        if self._in_step:
            self._in_step = False
            self._open.abandon_step()

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
        """See ``PoolWorker.submit``."""
        self._open.submit(mini_batch, layer, q, k, v, o)

    def ready(self, mini_batch: int) -> bool:
        """See ``PoolWorker.ready``."""
        return self._open.ready(mini_batch)

    def wait(self, mini_batch: int) -> None:
        """See ``PoolWorker.wait``."""
        self._open.wait(mini_batch)

    def export(self, sequence_id: int) -> np.ndarray:
        """See ``PoolWorker.export``."""
        return self._open.export(sequence_id)

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """See ``PoolWorker.import_``."""
        self._open.import_(sequence_id, num_tokens, data)

    def close(self) -> None:
        """See ``PoolWorker.close``."""
        self._in_step = False
        if self._worker:
            self._worker.close()

    @property
    def _open(self) -> _rworker.RWorker:
        if self._worker is None:
            raise ValueError("the R-worker is not open")
        return self._worker
