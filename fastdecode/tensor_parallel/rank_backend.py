"""Rank 0's attention backend: its own group of R-workers, with every step sent to the other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdecode.core.errors import FastDecodeError, RankLostError, interrupts_deferred
from fastdecode.core.parked import Parks
from fastdecode.core.step import MiniBatch, ScheduledStep
from fastdecode.core.types import RWorkerInfo, StepPlan, StepReport, Verb
from fastdecode.core.weighing import Queries, WeighedRow
from fastdecode.kinds.layout import KVLayout
from fastdecode.tensor_parallel.lifeline import Lifelines
from fastdecode.tensor_parallel.member import Group, Member
from fastdecode.tensor_parallel.rank_messages import Message, step_message, weigh_message
from fastdecode.tensor_parallel.rank_parking import MemberParks, RankParks

Controls = tuple[tuple[tuple[int, int, int, int], ...], ...]
"""The CONTROL records of each R-worker: four integers each, as in ``StepPlan``."""


class TensorParallelBackend:
    """An ``AttentionBackend`` over logical R-workers, each made of one R-worker per rank.

    Each step goes to the other ranks in one message: before its layers (``lead``), or at its end if the step computes
    no layers. Controls that reserve blocks go at once, since prefill workers fill these blocks next.
    """

    def __init__(self, member: Member, lifelines: Lifelines) -> None:
        self._member, self._lifelines = member, lifelines
        self._untold: Controls | None = None
        self._open = False
        self._has_all = False
        self._broken = False
        self._asked = 0.0

    @property
    def pool(self) -> Group:
        return self._member.pool

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        with self._talking():
            r_workers = self._member.open(layout)
        self._has_all = True
        return r_workers

    def parks(self, own: Parks) -> Parks:
        """Return access to the disks of all ranks' R-workers. ``own``: access to the disks of this rank's R-workers."""
        return RankParks(self, MemberParks(self._member, own))

    def ask_all(self, message: Message, do: Callable[[], Any]) -> Any:
        """Send ``message`` to the other ranks; return the result of ``do``, this rank's part of the same work."""
        self._tell(message)
        with self._talking():
            return do()

    def begin_prompts(self, num_tokens: int) -> None:
        """Let the other ranks prepare to attend prompts of up to ``num_tokens`` tokens. Steps may follow."""
        self._tell(Message("prompts", {"num_tokens": num_tokens}))

    def begin_step(self, plan: StepPlan) -> None:
        with interrupts_deferred():
            self._check()
            controls = tuple(tuple(map(tuple, part.controls.tolist())) for part in plan.workers)
            if any(verb == Verb.RESERVE for part in controls for verb, *_ in part):
                self._tell(step_message(ScheduledStep((MiniBatch.of([]),), controls), False, kind="reserve"))
                with self._talking():
                    self._member.reserve(plan)
                controls = ((),) * len(controls)
            else:
                self.pool.begin_step(plan)
            self._untold = controls

    @contextlib.contextmanager
    def lead(self, step: ScheduledStep, overlap: bool, by: str = "model") -> Iterator[None]:
        """Within the context, let this rank compute the layers of ``step``, as all others do. Ctrl-C waits for the end.

        ``by``: the part of the model that computes the layers, see ``step_message``.
        """
        with interrupts_deferred(), self._talking():
            step = replace(step, controls=self._untold or step.controls)
            self._untold, self._open = None, True
            self._member.rank.broadcast(step_message(step, True, overlap, by).encode())
            yield

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.pool.submit(mini_batch, layer, q, k, v)

    def ready(self, mini_batch: int) -> bool:
        return self.pool.ready(mini_batch)

    def collect(self, mini_batch: int) -> np.ndarray:
        return self.pool.collect(mini_batch)

    def weigh(self, rows: Sequence[WeighedRow], queries: Queries) -> list[np.ndarray | None]:
        with interrupts_deferred():
            self._tell(weigh_message(rows))
            with self._talking():
                return self._member.weigh(rows, queries)

    def end_step(self) -> StepReport:
        with interrupts_deferred(), self._talking():
            self._tell_controls()
            self._open = False
            self._member.rank.broadcast(Message("end").encode())
            return self._member.end_step()

    def abandon_step(self) -> None:
        with interrupts_deferred(), contextlib.suppress(RankLostError):
            self.pool.abandon_step()
            if not self._broken and (self._untold is not None or self._open):
                with self._talking():
                    self._tell_controls()
                    self._open = False
                    self._member.rank.broadcast(Message("abandon").encode())

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        with interrupts_deferred():
            told = {"worker": worker, "sequence_id": sequence_id, "start": start, "num_tokens": num_tokens}
            self._tell(Message("export", told))
            with self._talking():
                return self._member.export(worker, sequence_id, start, num_tokens)

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        """See ``AttentionBackend.import_``. ``data`` must be what ``export`` returned last."""
        with interrupts_deferred():
            told = {"worker": worker, "sequence_id": sequence_id, "num_tokens": num_tokens, "start": start}
            self._tell(Message("import", told))
            with self._talking():
                self._member.import_(worker, sequence_id, num_tokens, start)

    def admit(self, vacant: Sequence[int] = ()) -> dict[int, RWorkerInfo]:
        self._check()
        # Seconds between two questions to the other ranks about R-workers that have joined
        admit_seconds = 0.2
        if self.pool.join_listener is None or time.monotonic() < self._asked + admit_seconds:
            return {}
        self._asked = time.monotonic()
        with interrupts_deferred():
            self._tell(Message("admit", {"vacant": list(vacant)}))
            with self._talking():
                return self._member.admit(vacant)

    def dismiss(self, worker: int) -> None:
        with interrupts_deferred():
            self._tell(Message("dismiss", {"worker": worker}))
            self._member.dismiss(worker)

    def forget(self, sequence_id: int) -> None:
        """Free the keys and values that all ranks keep for the aborted prompt of sequence ``sequence_id``."""
        if not self._broken:
            self._tell(Message("forget", {"sequence_id": sequence_id}))

    def close(self) -> None:
        """See ``AttentionBackend.close``.

        Other ranks are told to close only if all ranks could open their R-workers; otherwise each has closed its own.
        """
        with interrupts_deferred():
            with contextlib.suppress(RankLostError):
                if self._has_all:
                    self._tell(Message("close"))
            if self._broken or not self._has_all:
                self.pool.break_off()
            self._broken = True
            self.pool.close()

    def _tell_controls(self) -> None:
        """Send the other ranks the controls of the current step if it has no layers; no effect outside a step."""
        if self._untold is not None:
            step = ScheduledStep((MiniBatch.of([]),), self._untold)
            self._untold, self._open = None, True
            self._member.rank.broadcast(step_message(step, False).encode())

    def _tell(self, message: Message) -> None:
        with interrupts_deferred(), self._talking():
            self._member.rank.broadcast(message.encode())

    def _check(self) -> None:
        if self._broken or self._lifelines.lost:
            self._broken = True
            raise RankLostError(self._lifelines.describe())

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Raise RankLostError if a rank is lost within the context.

        A failure within the layers, or any unexpected error, also ends the job, since the other ranks do not know of
        the failure.
        """
        self._check()
        try:
            yield
        except RuntimeError as error:  # torch.distributed raises this if a rank is lost
            self._broken = True
            raise RankLostError(self._lifelines.describe(error)) from error
        except FastDecodeError:
            self._broken = self._open
            raise
        except BaseException:
            self._broken = True
            raise
