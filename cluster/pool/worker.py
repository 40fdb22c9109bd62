"""The pool's interface to one R-worker, a stand-in for a lost R-worker, and the record of a joined one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastdecode.cluster.pool.remote_stores import Disk
from fastdecode.cluster.pool.routed_rows import Arrays
from fastdecode.core.auditing import AuditAnswer, AuditQuestion
from fastdecode.core.types import RWorkerInfo, WorkerPlan, WorkerReport
from fastdecode.core.weighing import Weighing
from fastdecode.kinds.layout import KVLayout

if TYPE_CHECKING:
    from fastdecode.cluster.pool.remote_stores import RemoteJournal


class PoolWorker:
    """The pool's interface to one R-worker.

    Slow requests have a method that sends and one that waits. The pool calls the first on all workers, then the second.

    A refusal is a ValueError or KeyError with the reason, and changes nothing. A WorkerLostError names a lost worker.
    """

    name: str

    def open(self, layout: KVLayout) -> None:
        """Ask the R-worker to make a cache for ``layout``; ``opened`` waits for the answer."""
        raise NotImplementedError

    def opened(self) -> RWorkerInfo:
        """Wait until the R-worker has a cache; return its description. Raise CapacityError if memory is too small."""
        raise NotImplementedError

    def begin_step(self, plan: WorkerPlan) -> None:
        """Send ``plan``, this R-worker's part of a step; ``begun`` waits for the answer."""
        raise NotImplementedError

    def begun(self) -> None:
        """Wait for the answer to ``begin_step``."""

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        """Start attention of one layer for a mini-batch's rows on this R-worker. ``wait`` returns when o is filled.

        Arrays are as in ``AttentionBackend.submit`` and ``collect``, with this worker's rows only. Partial results:
        float32 [rows, num_heads, 2 + output_dim], filled as ``_rworker.RWorker.submit`` says, or None.
        """
        raise NotImplementedError

    def ready(self, mini_batch: int) -> bool:
        """Return whether ``wait`` would return at once."""
        raise NotImplementedError

    def wait(self, mini_batch: int) -> None:
        """Wait until the submitted layer of this mini-batch is computed and its o is filled."""

    def share(self, mini_batch: int, layer: int, counts: np.ndarray) -> None:
        """Tell the R-worker how many of its tokens index layer ``layer`` has picked, out of those on all R-workers.

        ``counts``: see ``RoutedRows.picks``. Only the first row of each query is used.
        """

    def weigh(self, asked: Weighing) -> Callable[[], np.ndarray]:
        """Ask for a query's attention weight per block of tokens, after the last layer of the step.

        Return a function that waits for the answer: float32, weights [num_blocks], or norms [1, heads, 2].
        """
        raise NotImplementedError

    def audit(self, asked: Sequence[AuditQuestion]) -> Callable[[], list[AuditAnswer]]:
        """Ask about rows of the open step, after its last layer; return a function that waits for the answers.

        Before the first step, a call without questions makes the R-worker keep checksums of full blocks.
        """
        raise NotImplementedError

    def end_step(self) -> None:
        """Ask the R-worker to commit the step; ``ended`` waits for the answer."""

    def ended(self) -> WorkerReport:
        """Wait for the answer to ``end_step``. The pool fills in the report's ``transfer_seconds``, which is 0 here."""
        raise NotImplementedError

    def abandon_step(self) -> None:
        """Drop the open step; no effect without an open step, and no error if the R-worker is lost."""

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        raise NotImplementedError

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        raise NotImplementedError

    @property
    def disk(self) -> Disk | None:
        """The R-worker's disk for parking prefixes; None without a disk."""
        return None

    @property
    def journal(self) -> RemoteJournal | None:
        """The session's journal on this R-worker; None if the R-worker ends with this process or keeps no session."""
        return None

    def break_off(self) -> None:
        """Close without a BYE, so that an R-worker in another process may keep its sequences."""
        self.close()

    def close(self) -> None:
        """End the session, whose cache the R-worker frees; may be called twice."""


class LostWorker(PoolWorker):
    """Stands in for a lost or dismissed R-worker: its rows of o are zeros, and its report is empty."""

    def __init__(self, name: str, step_shape: tuple[int, int]) -> None:
        """``step_shape``: (number of mini-batches, number of layers) of the current step."""
        self.name = name
        self._step_shape = step_shape

    def open(self, layout: KVLayout) -> None:
        raise ValueError("the R-worker is lost")

    def opened(self) -> RWorkerInfo:
        raise ValueError("the R-worker is lost")

    def begin_step(self, plan: WorkerPlan) -> None:
        self._step_shape = (len(plan.mini_batches), self._step_shape[1])

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        *_, o, partials = arrays
        o[...] = 0
        if partials is not None:
            partials[...] = (-np.inf, *(0.0,) * (partials.shape[2] - 1))

    def ready(self, mini_batch: int) -> bool:
        return True

    def ended(self) -> WorkerReport:
        return WorkerReport(np.zeros(self._step_shape), np.zeros(self._step_shape), 0.0, 0, 0)

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        raise ValueError("the R-worker is lost")

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        raise ValueError("the R-worker is lost")


@dataclass(frozen=True)
class Joined:
    """An R-worker that has joined and is open, and its description."""

    worker: PoolWorker
    info: RWorkerInfo
