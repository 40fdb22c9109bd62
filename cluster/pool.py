"""The pool: one attention backend over R-workers of any kind, which scatters q, k, v and gathers o."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fastdecode.cluster.copies import CopiedRows
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.cluster.ranges import Arrays, RangeRows
from fastdecode.cluster.wire.handshake import Security
from fastdecode.cluster.wire.payload import row_counts, slices
from fastdecode.cluster.workers import InprocWorker, LostWorker, PoolWorker, transfer_seconds
from fastdecode.errors import BackendError, WorkerLostError
from fastdecode.types import (
    ISAS,
    WIRE_DTYPE,
    KVLayout,
    RWorkerInfo,
    StepPlan,
    StepReport,
    WorkerReport,
)

if TYPE_CHECKING:  # most pools have none, and need no ZeroMQ
    from fastdecode.cluster.joining import Joined, JoinListener

FAILURES = (ValueError, KeyError, WorkerLostError)
"""What a ``PoolWorker`` raises: a refusal, or that it is lost."""

MOST_NAMES = 1000

logger = logging.getLogger(__name__)


@dataclass
class _MiniBatchRows:
    """The workers with rows in one mini-batch (index, attending rows, all rows), and the o being filled.

    ``ranges``: where sequences attend in ranges; ``copies``: where some have second copies.
    """

    busy: list[tuple[int, slice, slice]]
    ranges: RangeRows | None = None
    copies: CopiedRows | None = None
    outputs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    current: np.ndarray | None = None
    layer: int = 0


class PoolBackend:
    """``AttentionBackend`` over R-workers of any kind; one that is lost in a step leaves the others going.

    ``joined``: names of the last R-workers that have joined since ``open``, in order.
    """

    def __init__(self, workers: Sequence[PoolWorker]) -> None:
        self.workers = list(workers)
        self.joined: deque[str] = deque(maxlen=MOST_NAMES)
        self.join_listener: JoinListener | None = None
        self._lost: list[int] = []
        self._leaving: list[int] = []
        self._asked_to_leave: set[str] = set()
        self._layout = KVLayout((), "float32", "float32")
        self._rows: list[_MiniBatchRows] = []
        self._submitted, self._arrived = np.zeros((0, 0)), np.zeros((0, 0, 0))
        self._blocks: dict[int, tuple[int, int]] = {}
        self._isas: dict[str, str] = {}
        self._newcomers: list[Joined] = []

    def accept_joins(self, listener: JoinListener) -> None:
        """Let R-workers join through ``listener``, which the pool closes; to be called before ``open``."""
        self.join_listener = listener

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        self._layout = layout
        self._submitted = np.zeros((0, len(layout.layers)))  # its shape is what a worker lost before any step had
        try:
            for worker in self.workers:
                worker.open(layout)
            infos = [worker.opened() for worker in self.workers]
        except BaseException:
            self.close()
            raise
        self._blocks = {index: (info.num_blocks, info.num_blocks) for index, info in enumerate(infos)}
        self._warn_if_arithmetic_differs(infos)
        if self.join_listener:
            self.join_listener.open(layout)
        return infos

    def begin_step(self, plan: StepPlan) -> None:
        num_mini_batches = len(plan.workers[0].mini_batches)
        self._rows = [self._mini_batch_rows(plan, mini_batch) for mini_batch in range(num_mini_batches)]
        self._submitted = np.zeros((num_mini_batches, len(self._layout.layers)))
        self._arrived = np.zeros((len(self.workers), *self._submitted.shape))
        try:
            for index, part in enumerate(plan.workers):
                try:
                    self.workers[index].begin_step(part)
                except FAILURES as error:
                    self._failed(index, "the step's plan", error)
            for index in range(len(self.workers)):
                try:
                    self.workers[index].begun()
                except FAILURES as error:
                    self._failed(index, "the step's plan", error)
        except BaseException:
            self.abandon_step()
            raise

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self._submitted[mini_batch, layer] = time.perf_counter()
        rows = self._rows[mini_batch]
        rows.layer = layer
        o = rows.current = self._output(rows, layer, len(q))
        for index, attending, all_rows in rows.busy:
            arrays: Arrays = q[attending], k[all_rows], v[all_rows], o[attending], None
            if rows.copies:
                copied_k = rows.copies.stored(index, "k", k, all_rows)
                arrays = q[attending], copied_k, rows.copies.stored(index, "v", v, all_rows), o[attending], None
            if rows.ranges:
                arrays = rows.ranges.arrays(index, layer, q, *arrays[:4])
            try:
                self.workers[index].submit(mini_batch, layer, *arrays)
            except FAILURES as error:
                self._failed(index, "a layer", error)

    def ready(self, mini_batch: int) -> bool:
        return all(self._is_ready(index, mini_batch) for index, _, _ in self._rows[mini_batch].busy)

    def collect(self, mini_batch: int) -> np.ndarray:
        rows = self._rows[mini_batch]
        if rows.current is None:
            raise BackendError(f"collect: mini-batch {mini_batch} was never submitted")
        for index, _, _ in rows.busy:
            waits = not self._is_ready(index, mini_batch)
            try:
                self.workers[index].wait(mini_batch)
            except FAILURES as error:
                self._failed(index, "a layer", error)
            if waits:
                self._arrived[index, mini_batch, rows.layer] = time.perf_counter()
        if rows.ranges:
            rows.ranges.merge(rows.layer, rows.current, "scalar" if set(self._isas) == {"scalar"} else "auto")
        return rows.current

    def end_step(self) -> StepReport:
        for index in range(len(self.workers)):
            try:
                self.workers[index].end_step()
            except FAILURES as error:
                self._failed(index, "the end of the step", error)
        reports = tuple(self._report(index) for index in range(len(self.workers)))
        lost, self._lost = tuple(self._lost), []
        leaving, self._leaving = tuple(self._leaving), []
        return StepReport(reports, lost, leaving)

    def abandon_step(self) -> None:
        for worker in self.workers:
            worker.abandon_step()

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        holder = self._worker(worker, "export")
        try:
            return holder.export(sequence_id, start, num_tokens)
        except (ValueError, KeyError) as error:
            raise _refusal(holder, "to export a sequence", error) from error

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        holder = self._worker(worker, "import")
        try:
            holder.import_(sequence_id, num_tokens, data, start)
        except (ValueError, KeyError) as error:
            raise _refusal(holder, "to import a sequence", error) from error

    @property
    def num_newcomers(self) -> int:
        """R-workers that have joined and were not admitted yet."""
        self._newcomers += self.join_listener.joined() if self.join_listener else []
        return len(self._newcomers)

    def admit(self, vacant: Sequence[int] = (), most: int | None = None) -> dict[int, RWorkerInfo]:
        """See ``AttentionBackend.admit``; ``most`` of them, the others another time."""
        infos = {}
        count = self.num_newcomers if most is None else most
        taken, self._newcomers = self._newcomers[:count], self._newcomers[count:]
        for number, joined in enumerate(taken):
            index = vacant[number] if number < len(vacant) else len(self.workers)
            self.workers[index : index + 1] = [joined.worker]
            self._blocks[index] = (joined.info.num_blocks,) * 2
            self.joined.append(joined.info.name)
            infos[index] = joined.info
        self._warn_if_arithmetic_differs(list(infos.values()))
        return infos

    def dismiss(self, worker: int) -> None:
        name = self.workers[worker].name
        self._replace(worker)
        if self.join_listener and name in self._asked_to_leave:
            self.join_listener.forget(name)  # its process ends; another may begin there
        elif self.join_listener:
            self.join_listener.dismissed(name)
        self._asked_to_leave.discard(name)

    def give_up(self, worker: int) -> None:
        """Between steps: forget R-worker ``worker`` and what it holds; it may join anew."""
        if not isinstance(gone := self.workers[worker], LostWorker):
            self._replace(worker)
            if self.join_listener:
                self.join_listener.forget(gone.name)

    def close(self) -> None:
        if self.join_listener:
            self.join_listener.close()
        for joined in self._newcomers:
            joined.worker.close()
        self._newcomers = []
        for worker in self.workers:
            worker.close()
        self.workers = []

    @property
    def blocks_used(self) -> int:
        """Referenced blocks over all workers, as of the last step's end."""
        return sum(num_blocks - free for num_blocks, free in self._blocks.values())

    def _warn_if_arithmetic_differs(self, infos: Sequence[RWorkerInfo]) -> None:
        """Warn where the R-workers of ``infos`` round in another way than those before them."""
        before = len(self._isas)
        for info in infos:
            self._isas.setdefault(info.isa, info.name)
        if len(self._isas) > max(before, 1):
            logger.warning(
                "R-workers attend in different arithmetic (%s): on another one a sequence may get other tokens; "
                "--uniform-arithmetic %s makes all take one",
                ", ".join(f"{isa} on {name}" for isa, name in self._isas.items()),
                min(self._isas, key=ISAS.index),
            )

    def _is_ready(self, index: int, mini_batch: int) -> bool:
        try:
            return self.workers[index].ready(mini_batch)
        except FAILURES as error:
            self._failed(index, "a layer", error)
            return True

    def _failed(self, index: int, refused: str, error: Exception) -> None:
        """Replace worker ``index`` where ``error`` says that it is lost; else BackendError: it refused ``refused``."""
        if not isinstance(error, WorkerLostError):
            raise _refusal(self.workers[index], refused, error) from error
        self._lose(index, error)

    def _lose(self, index: int, error: WorkerLostError) -> None:
        """Go on without a worker, whose rows read zeros from now on; WorkerLostError when it was the last."""
        name = self.workers[index].name
        self._replace(index)
        self._lost.append(index)
        self._asked_to_leave.discard(name)
        if self.join_listener:
            self.join_listener.forget(name)
        if all(isinstance(worker, LostWorker) for worker in self.workers):
            raise WorkerLostError(f"{error}, and no other R-worker is left") from error
        logger.warning("%s; its sequences go on from second copies, or are computed again on the others", error)
        for rows in self._rows:
            if rows.ranges:
                rows.ranges.lose(index)
            for busy, attending, _ in rows.busy:
                if busy == index and rows.current is not None:
                    rows.current[attending] = 0

    def _replace(self, index: int) -> None:
        gone = self.workers[index]
        gone.close()
        self.workers[index] = LostWorker(gone.name, self._step_shape)
        self._blocks[index] = (0, 0)

    @property
    def _step_shape(self) -> tuple[int, int]:
        return self._submitted.shape[0], self._submitted.shape[1]

    def _worker(self, index: int, what: str) -> PoolWorker:
        if not 0 <= index < len(self.workers):
            raise BackendError(f"{what}: there is no R-worker {index}; there are {len(self.workers)}")
        return self.workers[index]

    def _report(self, index: int) -> WorkerReport:
        times = self._ended(index)
        if times.leaving:
            self._leaving.append(index)
            self._asked_to_leave.add(self.workers[index].name)
        num_blocks = self._blocks[index][0]
        self._blocks[index] = (num_blocks, min(times.blocks_free, num_blocks))
        transfer = transfer_seconds(self._submitted, times.busy_start, times.busy_end, self._arrived[index])
        return replace(times, transfer_seconds=transfer)

    def _ended(self, index: int) -> WorkerReport:
        try:
            return self.workers[index].ended()
        except FAILURES as error:
            self._failed(index, "the end of the step", error)
            return self.workers[index].ended()  # the LostWorker in its place

    def _mini_batch_rows(self, plan: StepPlan, mini_batch: int) -> _MiniBatchRows:
        spans = [part.mini_batches[mini_batch] for part in plan.workers]
        counts = [row_counts(each) for each in spans]
        ranges = copies = None
        if plan.copies and len(plan.copies[mini_batch]):
            copies = CopiedRows(plan.copies[mini_batch], len(spans))
            counts = [rows._replace(stored=rows.stored - copies.num_copied(i)) for i, rows in enumerate(counts)]
        if plan.gathers and len(plan.gathers[mini_batch]):
            ranges = RangeRows(self._layout, plan.gathers[mini_batch], spans)
            counts = [rows._replace(queries=rows.queries - ranges.num_copied(i)) for i, rows in enumerate(counts)]
        places = (slices([count[i] for count in counts]) for i in range(2))
        dealt = zip(range(len(counts)), *places, strict=True)
        extra = [each.num_copied for each in (ranges, copies) if each]
        busy = [
            each for each in dealt if each[2].start < each[2].stop or any(num_copied(each[0]) for num_copied in extra)
        ]
        return _MiniBatchRows(busy, ranges, copies)

    def _output(self, rows: _MiniBatchRows, layer: int, num_rows: int) -> np.ndarray:
        """The mini-batch's o buffer, one per head shape, reused by its layers."""
        shape = (self._layout.layers[layer].num_heads, self._layout.layers[layer].value_head_dim)
        if shape not in rows.outputs:
            rows.outputs[shape] = np.empty((num_rows, *shape), dtype=WIRE_DTYPE[self._layout.model_dtype])
        return rows.outputs[shape]


class InprocBackend(PoolBackend):
    """``AttentionBackend`` over R-workers in this process, one per entry of ``sizes``, each with its own threads."""

    def __init__(
        self,
        sizes: Sequence[RWorkerSize],
        block_size: int,
        own_cores: bool = False,
        security: Security | None = None,
    ) -> None:
        """``own_cores``: the S-worker does not run on the cores of ``sizes``. ``security``: of their KV ports."""
        waits_working = len(sizes) == 1 and not own_cores
        super().__init__(
            [
                InprocWorker(f"inproc-{i}", size, block_size, own_cores, waits_working, security)
                for i, size in enumerate(sizes)
            ]
        )


def _refusal(worker: PoolWorker, what: str, error: Exception) -> BackendError:
    return BackendError(f"R-worker {worker.name} refused {what}: {error.args[0]}")
