"""What stands where an R-worker was."""

from __future__ import annotations

import numpy as np

from fastdecode.cluster.pool_worker import StepTimes
from fastdecode.types import KVLayout, RWorkerInfo, WorkerPlan


class LostWorker:
    """``PoolWorker`` that is gone: its rows read zeros to the end of the step, and it is never heard of again."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        """``shape``: mini-batches and layers of the step."""
        self.name = name
        self._shape = shape

    def open(self, layout: KVLayout) -> None:
        """See ``PoolWorker.open``."""
        raise ValueError("it is lost")

    def opened(self) -> RWorkerInfo:
        """See ``PoolWorker.opened``."""
        raise ValueError("it is lost")

    def begin_step(self, plan: WorkerPlan) -> None:
        """See ``PoolWorker.begin_step``."""
        self._shape = (len(plan.mini_batches), self._shape[1])

    def begun(self) -> None:
        """See ``PoolWorker.begun``."""

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
        """See ``PoolWorker.submit``."""
        o[...] = 0

    def ready(self, mini_batch: int) -> bool:
        """See ``PoolWorker.ready``."""
        return True

    def wait(self, mini_batch: int) -> None:
        """See ``PoolWorker.wait``."""

    def end_step(self) -> None:
        """See ``PoolWorker.end_step``."""

    def ended(self) -> StepTimes:
        """See ``PoolWorker.ended``."""
        return StepTimes(np.zeros(self._shape), np.zeros(self._shape), 0, 0)

    def abandon_step(self) -> None:
        """See ``PoolWorker.abandon_step``."""

    def export(self, sequence_id: int) -> np.ndarray:
        """See ``PoolWorker.export``."""
        raise ValueError("it is lost")

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """See ``PoolWorker.import_``."""
        raise ValueError("it is lost")

    def close(self) -> None:
        """See ``PoolWorker.close``."""
