"""An R-worker for the pool: its interface, a lost one, and a joined one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastdecode.cluster.pool.disks import Disk
from fastdecode.cluster.pool.routed_rows import Arrays
from fastdecode.core.types import RWorkerInfo, WorkerPlan, WorkerReport
from fastdecode.core.weighing import Weighing
from fastdecode.kinds.layout import KVLayout

if TYPE_CHECKING:
    from fastdecode.cluster.pool.remote_journal import RemoteJournal


class PoolWorker:
    """The pool's interface to one R-worker.

    The pool sends a slow request to all workers before it waits for any answer. If answers come at once, there is
    nothing to wait for.

    A refusal is a ValueError or KeyError with the reason, and changes nothing. A WorkerLostError names a lost worker.
    """

    name: str

    def open(self, layout: KVLayout) -> None:
        """Request caches for ``layout``."""
        raise NotImplementedError

    def opened(self) -> RWorkerInfo:
        """Wait for the answer to ``open``. Raise CapacityError if its memory is too small."""
        raise NotImplementedError

    def begin_step(self, plan: WorkerPlan) -> None:
        """Send the plan of a step."""
        raise NotImplementedError

    def begun(self) -> None:
        """Wait for the answer to ``begin_step``."""

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        """Start one layer of one mini-batch with rows here. ``wait`` returns when o is filled.

        Arrays are as in ``AttentionBackend.submit`` and ``collect``, with this worker's rows only. Partial results:
        float32 [rows, num_heads, 2 + output_dim], filled as ``_rworker.RWorker.submit`` says; None without such rows.
        """
        raise NotImplementedError

    def ready(self, mini_batch: int) -> bool:
        """Return whether ``wait`` would return at once."""
        raise NotImplementedError

    def wait(self, mini_batch: int) -> None:
        """Wait for the submitted layer of this mini-batch."""

    def share(self, mini_batch: int, layer: int, counts: np.ndarray) -> None:
        """Send how many of the tokens ranked in index layer ``layer``, the last one, are picked.

        ``counts``: int32 [rows of partial results, heads that pick], for a row's first node.
        """

    def weigh(self, asked: Weighing) -> Callable[[], np.ndarray]:
        """Ask, once all layers of the step are done, how a query's attention is shared among blocks.

        Return a function that waits for the answer: float32, weights [num_blocks], or norms [1, heads, 2].
        """
        raise NotImplementedError

    def end_step(self) -> None:
        """Ask the worker to commit the step."""

    def ended(self) -> WorkerReport:
        """Wait for the answer to ``end_step``. Its ``transfer_seconds`` is 0."""
        raise NotImplementedError

    def abandon_step(self) -> None:
        """Drop the open step; no effect without one, and no error if the worker is lost."""

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        raise NotImplementedError

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        raise NotImplementedError

    @property
    def disk(self) -> Disk | None:
        """Its disk for parking; None if it has none."""
        return None

    @property
    def journal(self) -> RemoteJournal | None:
        """The session's journal there; None if it does not outlive this process, or keeps no session."""
        return None

    def break_off(self) -> None:
        """Close without a message to another process, which may then keep what it has."""
        self.close()

    def close(self) -> None:
        """Free everything; may be called twice."""


class LostWorker(PoolWorker):
    """A ``PoolWorker`` in place of a lost or dismissed one: its rows read zeros, and its report is empty."""

    def __init__(self, name: str, step_shape: tuple[int, int]) -> None:
        """``step_shape``: mini-batches and layers of the step."""
        self.name = name
        self._step_shape = step_shape

    def open(self, layout: KVLayout) -> None:
        raise ValueError("it is lost")

    def opened(self) -> RWorkerInfo:
        raise ValueError("it is lost")

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
        raise ValueError("it is lost")

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        raise ValueError("it is lost")


@dataclass(frozen=True)
class Joined:
    """An open R-worker that has joined, and its description."""

    worker: PoolWorker
    info: RWorkerInfo
