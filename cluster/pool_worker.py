"""One R-worker as the pool sees it, wherever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastdecode.types import KVLayout, RWorkerInfo, WorkerPlan


@dataclass(frozen=True)
class StepTimes:
    """What a worker says at the end of a step; the arrays as in ``WorkerReport``, on the S-worker's clock.

    ``leaving``: it asks to be let go.
    """

    busy_start: np.ndarray
    busy_end: np.ndarray
    bytes_read: int
    blocks_free: int
    leaving: bool = False


class PoolWorker(Protocol):
    """One R-worker as the pool sees it. What takes a while is asked of all workers first and answered later.

    Refusals are ValueError or KeyError with the reason, and change nothing; WorkerLostError names one that is lost.
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
