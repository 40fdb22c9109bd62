"""The loop over a scheduler's steps. A ``World`` computes them, copies cached tokens and provides the clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from fastdecode.core.errors import BackendError, interrupts_deferred
from fastdecode.core.metrics import StepRecord
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import StepReport
from fastdecode.cycle.contracts import Requests, World
from fastdecode.scheduler import Scheduler, TokenSequence

logger = logging.getLogger(__name__)

T = TypeVar("T")
"""The result of a step in a world: sampled tokens, or a substitute."""


class Companion:
    """A helper that works between steps: prefill workers, a drafter, R-workers that join and leave.

    ``s_seconds``, ``wait_seconds``: seconds between steps in which the S-worker computed for this companion, or waited
    for it. ``rests``: True while ``before`` has nothing to do.
    """

    s_seconds = wait_seconds = 0.0
    rests = False

    def joined(self, worker: int) -> None:
        """Note that an R-worker has joined as index ``worker``."""

    def before(self, cycle: Cycle) -> None:
        """Do pending work between two steps, unless this companion rests. Ctrl-C waits for the end of this call."""

    def prepare(self, cycle: Cycle) -> None:
        """Do pending work right before a step is scheduled. Ctrl-C may interrupt this call."""

    def begun(self, step: ScheduledStep) -> None:
        """Note that the R-workers have received ``step``."""

    def heard(self, cycle: Cycle, report: StepReport) -> None:
        """Handle ``report``, which the R-workers sent after a step, or after requests without attention rows.
        Lost R-workers are already removed; those that ask to leave are not.
        """

    def ended(self, cycle: Cycle, report: StepReport) -> None:
        """Handle the end of a committed step. ``heard`` was called with the same report before."""

    def forget(self, sequence_id: int) -> None:
        """Drop all data of a sequence that has ended or lost its cache; unknown ids are ignored."""


class Cycle(Generic[T]):
    """The engine's loop. A turn runs the companions, then schedules, sends, computes, commits and records one step.

    ``on_step`` is called with the record of each step that had rows, or sampled the first tokens of prompts from
    prefill workers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        world: World[T],
        requests: Requests[T],
        companions: Sequence[Companion] = (),
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.scheduler, self.world, self.requests = scheduler, world, requests
        self.companions = tuple(companions)
        self.on_step = on_step
        self._lost: tuple[int, ...] = ()  # R-workers lost since the last step record

    def turn(self) -> ScheduledStep:
        """Run one step and the companions' work around it; return the step.
        On any exception the R-workers drop the rows of the step, and the next turn computes them again.
        """
        try:
            with interrupts_deferred():
                self._before()
            for companion in self.companions:
                companion.prepare(self)
            step = self._begin()
            computed = self._compute(step)
            with interrupts_deferred():
                self._end(step, computed)
        except BaseException:
            self.world.abandon_step()
            raise
        if not step.num_tokens and not step.arrived:
            self.world.wait()
        return step

    def look_around(self) -> None:
        """Run the companions without a step, and find out which R-workers are lost or ask to leave."""
        with interrupts_deferred():
            self._before()
            self.tell()
            self._before()  # an R-worker that asks to leave and holds no sequence can leave at once

    def tell(self) -> tuple[int, ...]:
        """Send the pending requests that need no attention rows; return the R-workers that are lost."""
        with interrupts_deferred():
            self._tell_world(self.scheduler.controls_alone())
            try:
                report = self.world.end_step()
            except BaseException:
                self.world.abandon_step()
                raise
            self._hear(report)
        return report.lost

    def settle(self) -> None:
        """Send the pending controls if no sequence waits or runs, so that R-workers free all released blocks."""
        if self.scheduler.store.workers.has_controls and not self.scheduler.has_unfinished:
            self.tell()

    def lose(self, workers: Sequence[int]) -> list[int]:
        """Handle the loss of R-workers: tokens cached only there are recomputed. Return the affected sequence ids."""
        spoilt = self.scheduler.members.spoilt(workers) if workers else []
        for sequence_id in spoilt:
            self.forget(sequence_id)
        for worker in workers:
            for sequence in self.scheduler.members.lost(worker):
                self.requests.give_up(self, sequence)
        return spoilt

    def doubt(self) -> list[int]:
        """Let all running sequences be recomputed, and forget all prefixes; return the ids of these sequences.
        An R-worker was found at fault, so any cached token may be wrong, on any R-worker.
        """
        doubtful = self.scheduler.members.doubt()
        for sequence_id in doubtful:
            self.forget(sequence_id)
        return doubtful

    def finish(self, sequence: TokenSequence, reason: str) -> None:
        """End ``sequence``, which waits or runs, for ``reason``: see ``Scheduler.finish``."""
        self.scheduler.finish(sequence, reason)
        self.forget(sequence.sequence_id)

    def forget(self, sequence_id: int) -> None:
        """Make the world and all companions drop a sequence that has ended or lost its cache."""
        self.world.forget(sequence_id)
        for companion in self.companions:
            companion.forget(sequence_id)

    def _before(self) -> None:
        for companion in self.companions:
            if not companion.rests:
                companion.before(self)

    def _begin(self) -> ScheduledStep:
        """Schedule a step and send it to the R-workers. If they refuse it, its controls stay pending."""
        with interrupts_deferred():
            step = self.scheduler.schedule(self.world.now())
            self._forget_prompts_that_left()
            if not step.num_tokens and not step.arrived and not self._awaits:
                raise BackendError("no request can run: the scheduler promised room that it does not have (a bug)")
            self._tell_world(step)
            for companion in self.companions:
                companion.begun(step)
            self.requests.begun(step, self.world.now())
        return step

    @property
    def _awaits(self) -> bool:
        """True while a prompt is with prefill workers, or a sequence waits for a parked prefix."""
        return len(self.scheduler.remote_prompts) > 0 or self.scheduler.queue.num_aside > 0

    def _compute(self, step: ScheduledStep) -> T:
        try:
            return self.world.compute(step)
        except BaseException:
            self.scheduler.abandon(step)
            raise

    def _tell_world(self, step: ScheduledStep) -> None:
        try:
            self.world.tell(step)
        except BaseException:
            self.scheduler.take_back(step)
            raise

    def _end(self, step: ScheduledStep, computed: T) -> None:
        """Commit ``step`` on the R-workers and in the scheduler; pass its tokens to the requests."""
        try:
            report = self.world.end_step()
        except BaseException:
            self.scheduler.abandon(step)
            raise
        accepted = self.requests.accepted(step, computed)
        self.scheduler.commit(step, accepted)
        spoilt = self._hear(report)
        for companion in self.companions:
            companion.ended(self, report)
        num_output_tokens = self.requests.take(self, computed, accepted, spoilt)
        self.settle()
        if step.num_tokens or step.arrived:
            self._record(step, report, num_output_tokens)

    def _hear(self, report: StepReport) -> list[int]:
        """Handle the lost and leaving R-workers in ``report``; return the ids of sequences that lost cached tokens."""
        self._lost += report.lost
        spoilt = self.lose(report.lost)
        if report.is_doubtful:
            spoilt += self.doubt()
        for companion in self.companions:
            companion.heard(self, report)
        return spoilt

    def _record(self, step: ScheduledStep, report: StepReport, num_output_tokens: int) -> None:
        """Record the step, with the companions' seconds, which the step times for the scheduler leave out."""
        report = replace(report, lost=self._lost) if self._lost else report
        record = self.world.record(step, report, num_output_tokens, self.scheduler.store.pool)
        self._lost = ()
        s_seconds = record.s_seconds - sum(each.s_seconds for each in self.companions)
        wait_seconds = record.wait_seconds - sum(each.wait_seconds for each in self.companions)
        self.scheduler.observe(step, s_seconds, wait_seconds, record.r_seconds)
        if self.on_step:
            self.on_step(record)

    def _forget_prompts_that_left(self) -> None:
        """Drop what the S-worker keeps of preempted prompts, since other prompts need this memory."""
        left = self.scheduler.store.residents.left_scratch
        while left:
            self.forget(left.pop())
