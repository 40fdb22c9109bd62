"""The pool: one attention backend over R-workers of any kind. It sends them their rows of q, k, v, and gathers o."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import TypeVar

import numpy as np

from fastdecode.cluster.pool.audit import Verdict, Wait
from fastdecode.cluster.pool.members import PoolMembers
from fastdecode.cluster.pool.remote_stores import Disk
from fastdecode.cluster.pool.routed_rows import Form, RoutedRows, form_of, transfer_seconds
from fastdecode.cluster.pool.weighing import in_turns, weigh_rows
from fastdecode.cluster.pool.worker import LostWorker, PoolWorker
from fastdecode.core.auditing import AuditAnswer, AuditQuestion
from fastdecode.core.errors import BackendError, DamagedError, WorkerLostError
from fastdecode.core.optional import optional
from fastdecode.core.parked import Chain, Parked
from fastdecode.core.routes import routes_of_spans
from fastdecode.core.types import RWorkerInfo, StepPlan, StepReport, WorkerPlan, WorkerReport
from fastdecode.core.weighing import Queries, WeighedRow, Weighing
from fastdecode.kinds.layout import KVLayout

FAILURES = (ValueError, KeyError, WorkerLostError)
"""Errors that a ``PoolWorker`` raises: for a refused request (the first two), or for a lost R-worker."""

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class PoolBackend(PoolMembers):
    """An ``AttentionBackend`` over R-workers of any kind. If one is lost in a step, the others continue."""

    def __init__(self, workers: Sequence[PoolWorker]) -> None:
        super().__init__(workers)
        self._lost: list[int] = []
        self._faulty: list[int] = []
        self._suspects: dict[int, str] = {}
        self._rows: list[RoutedRows] = []
        self._forms: list[Form] = []
        self._submitted, self._arrived = np.zeros((0, 0)), np.zeros((0, 0, 0))

    @property
    def _is_empty(self) -> bool:
        return all(isinstance(worker, LostWorker) for worker in self.workers)

    def admit(self, vacant: Sequence[int] = (), most: int | None = None) -> dict[int, RWorkerInfo]:
        return super().admit(vacant, most) if self._newcomers or self._returns else {}

    def set_audit(self, fraction: float, seed: int) -> None:
        """Audit a ``fraction`` of all rows; 0 audits none. Call this before ``open``."""
        if fraction > 0:
            self.audit = optional("audit").RandomAudit(fraction, seed)

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        infos = super().open(layout)
        self._forms = [form_of(layer) for layer in layout.layers]
        try:
            self.audit.open(layout, infos, self._ask_audit)
        except BaseException:
            self._leave_unopened()
            raise
        return infos

    def begin_step(self, plan: StepPlan) -> None:
        if self.workers and self._is_empty:
            raise self._none_left("all R-workers are lost")
        routes = plan.routes or routes_of_spans(plan.workers)
        self._rows = [RoutedRows(self._layout, self._forms, each) for each in routes]
        self._step_shape = (len(self._rows), len(self._layout.layers))
        self._submitted = np.zeros(self._step_shape)
        self._arrived = np.zeros((len(self.workers), *self._submitted.shape))
        try:
            parts = plan.workers
            if plan.handovers:
                parts = optional("handovers").hand_over(plan, self._send, self._unless_lost)
            self._send(parts)
            self._blame(Verdict(*each) for each in self._suspects.items())
            self._suspects.clear()
            if self.audit.is_on:
                self.audit.begin(plan, routes)
        except BaseException:
            self.abandon_step()
            raise

    def _send(self, parts: Sequence[WorkerPlan]) -> None:
        """Send each R-worker its part of a step, and wait until all have begun it."""
        for index, part in enumerate(parts):
            self._tell(index, "the step's plan", methodcaller("begin_step", part))
        for index in range(len(self.workers)):
            self._tell(index, "the step's plan", methodcaller("begun"))

    def _tell(self, index: int, what: str, call: Callable[[PoolWorker], None]) -> None:
        """Call ``call`` with worker ``index``; ``what`` names the request in errors."""
        try:
            call(self.workers[index])
        except FAILURES as error:
            self._failed(index, what, error)

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self._submitted[mini_batch, layer] = time.perf_counter()
        if self.audit.is_on:
            self.audit.sent(mini_batch, layer, q)
        for index, arrays in self._rows[mini_batch].scatter(layer, q, k, v):
            try:
                self.workers[index].submit(mini_batch, layer, arrays)
            except FAILURES as error:
                self._failed(index, "a layer", error)

    def ready(self, mini_batch: int) -> bool:
        return all(self._is_ready(index, mini_batch) for index in self._rows[mini_batch].busy)

    def collect(self, mini_batch: int) -> np.ndarray:
        rows = self._rows[mini_batch]
        if rows.layer is None:
            raise BackendError(f"collect: mini-batch {mini_batch} was never submitted")
        for index in rows.busy:
            waits = not self._is_ready(index, mini_batch)
            try:
                self.workers[index].wait(mini_batch)
            except FAILURES as error:
                self._failed(index, "a layer", error)
            if waits:
                self._arrived[index, mini_batch, rows.layer] = time.perf_counter()
        o = rows.gather(self._arithmetic.of_merges)
        for index, counts in rows.picks():
            self._tell(index, "what its ranges pick", methodcaller("share", mini_batch, rows.layer, counts))
        if self.audit.is_on:
            self.audit.arrived(mini_batch, rows, o)
        return o

    def weigh(self, rows: Sequence[WeighedRow], queries: Queries) -> list[np.ndarray | None]:
        self.audit.settle()
        return weigh_rows(self._layout, rows, queries, self._ask_to_weigh)

    def end_step(self) -> StepReport:
        before = self.audit.num_rows
        verdicts = self.audit.verdicts() if self.audit.is_on else []
        self._blame(verdicts)
        for index in range(len(self.workers)):
            self._tell(index, "the end of the step", methodcaller("end_step"))
        reports = tuple(self._report(index) for index in range(len(self.workers)))
        lost, self._lost = tuple(self._lost), []
        faulty, self._faulty = tuple(self._faulty), []
        leaving = tuple(index for index, report in enumerate(reports) if report.leaving)
        is_doubtful = bool(faulty or verdicts)
        return StepReport(reports, lost, leaving, faulty, is_doubtful, self.audit.num_rows - before)

    def abandon_step(self) -> None:
        self.audit.abandon()
        for worker in self.workers:
            worker.abandon_step()

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        with self.asked(worker, "export") as holder:
            return holder.export(sequence_id, start, num_tokens)

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        with self.asked(worker, "import") as holder:
            holder.import_(sequence_id, num_tokens, data, start)

    @contextlib.contextmanager
    def asked(self, index: int, what: str) -> Iterator[PoolWorker]:
        """Yield R-worker ``index``, to which the caller makes a request in the ``with`` block.

        ``what`` names the request in errors. Raise BackendError if there is no such R-worker or it refuses the request.
        """
        if not 0 <= index < len(self.workers):
            raise BackendError(f"{what}: there is no R-worker {index}; there are {len(self.workers)}")
        try:
            yield self.workers[index]
        except DamagedError as error:
            self._suspects.setdefault(index, str(error))
            raise
        except (ValueError, KeyError) as error:
            raise _refusal(self.workers[index], f"to {what} a sequence", error) from error

    def _ask_audit(self, index: int, asked: Sequence[AuditQuestion]) -> Wait:
        """Send the questions of an audit to R-worker ``index``; see ``Ask``."""
        wait: Callable[[], list[AuditAnswer]] | None = self._unless_lost(index, methodcaller("audit", asked))
        return (lambda: None) if wait is None else partial(self._unless_lost, index, partial(_answered, wait))

    def _blame(self, verdicts: Iterable[Verdict]) -> None:
        """Drop the R-workers that ``verdicts`` name, and let no R-worker of their hosts join again."""
        for worker, reason in verdicts:
            if worker < 0:
                logger.error("an audit names no R-worker: %s; running sequences are computed again", reason)
            elif not isinstance(self.workers[worker], LostWorker):
                self._failed(worker, "an audit", DamagedError(f"R-worker {self.workers[worker].name}: {reason}"))

    def _ask_to_weigh(self, asked: Sequence[Weighing]) -> list[np.ndarray | None]:
        """Send each question to its R-worker; return the answers in order, None for a lost R-worker."""
        answers: list[np.ndarray | None] = [None] * len(asked)
        for turn in in_turns(asked):
            waits = [(at, self._unless_lost(asked[at].part.worker, methodcaller("weigh", asked[at]))) for at in turn]
            for at, wait in waits:
                if wait is not None:
                    answers[at] = self._unless_lost(asked[at].part.worker, partial(_answered, wait))
        return answers

    def _unless_lost(self, index: int, ask: Callable[[PoolWorker], Answer]) -> Answer | None:
        """Return the result of ``ask`` with worker ``index``; None if the worker is lost."""
        if isinstance(self.workers[index], LostWorker):
            return None
        try:
            return ask(self.workers[index])
        except FAILURES as error:
            self._failed(index, "a question", error)
            return None

    def _is_ready(self, index: int, mini_batch: int) -> bool:
        try:
            return self.workers[index].ready(mini_batch)
        except FAILURES as error:
            self._failed(index, "a layer", error)
            return True

    def _failed(self, index: int, refused: str, error: Exception) -> None:
        """Handle ``error`` of worker ``index``: if the worker is lost, continue without it; its rows of o become zeros.

        Raise BackendError if the worker refused the request ``refused``. Raise WorkerLostError if no worker is left, or
        NoRWorkerError if another may join.
        """
        if not isinstance(error, WorkerLostError):
            raise _refusal(self.workers[index], refused, error) from error
        gone = self.workers[index]
        self.give_up(index)
        self._lost.append(index)
        if isinstance(error, DamagedError):
            self._faulty.append(index)
            self.exclude(gone.name)
            logger.error(
                "R-worker %s is at fault and is not used any more: check its host. All running sequences are computed "
                "again. Prefixes that were parked since it came may be wrong: fastdecode cache drop", gone.name,
            )  # fmt: skip
        else:
            self._expect(gone, self._is_empty)
        if self._is_empty:
            raise self._none_left(f"{error}, and no other R-worker is left") from error
        logger.warning("%s; its sequences continue from second copies, or are computed again on the others", error)
        for rows in self._rows:
            rows.lose(index)

    def _report(self, index: int) -> WorkerReport:
        """Return worker ``index``'s report on the step; an empty report if the worker is lost."""
        try:
            times = self.workers[index].ended()
        except FAILURES as error:
            self._failed(index, "the end of the step", error)
            times = self.workers[index].ended()  # ``_failed`` has put a ``LostWorker`` at this index
        if times.leaving and self._newcomers:
            self._newcomers.asks_to_leave(self.workers[index].name)
        num_blocks = self._blocks[index][0]
        self._blocks[index] = (num_blocks, min(times.blocks_free, num_blocks))
        transfer = transfer_seconds(self._submitted, times.busy_start, times.busy_end, self._arrived[index])
        return replace(times, transfer_seconds=transfer)


def _answered(wait: Callable[[], Answer], worker: PoolWorker) -> Answer:
    return wait()


def _refusal(worker: PoolWorker, what: str, error: Exception) -> BackendError:
    return BackendError(f"R-worker {worker.name} refused {what}: {error.args[0]}")


class PoolParks:
    """Implements ``Parks``, parking of prefixes on disks, over a pool's R-workers."""

    def __init__(self, pool: PoolBackend) -> None:
        self._pool = pool

    def chains(self, worker: int, model: str) -> list[Chain]:
        with self._pool.asked(worker, "park") as holder:
            return _disk(holder.disk).chains(model)

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes] = (), patience_ms: int = 2
    ) -> Parked:
        with self._pool.asked(worker, "park") as holder:
            return _disk(holder.disk).park(patience_ms, sequence_id, chain, superseded)

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int = 2) -> Parked:
        with self._pool.asked(worker, "wake") as holder:
            return _disk(holder.disk).wake(patience_ms, sequence_id, num_blocks, name)


def _disk(disk: Disk | None) -> Disk:
    if disk is None:
        raise ValueError("the R-worker has no disk to park on")
    return disk
