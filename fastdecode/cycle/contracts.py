"""The interfaces of a cycle: ``World``, which computes its steps, and ``Requests``, which receives the tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastdecode.core.metrics import Pool, StepRecord
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import StepReport
from fastdecode.scheduler import Scheduler, TokenSequence, Transfer

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True)
class JoinedWorker:
    """An R-worker that has joined. ``bandwidth``: relative to other R-workers; None for the mean of these."""

    num_blocks: int
    bandwidth: float | None = None
    host: str = ""
    name: str = ""


class World(Protocol[T_co]):
    """The environment in which steps run: an engine's, a simulation, or a naive one in tests."""

    def now(self) -> float:
        """Return this world's time in seconds."""

    def tell(self, step: ScheduledStep) -> None:
        """Send the controls and rows of ``step`` to the R-workers. If sending fails, R-workers have applied nothing."""

    def compute(self, step: ScheduledStep) -> T_co:
        """Compute the rows of ``step`` and return the results."""

    def end_step(self) -> StepReport:
        """Commit the open step; return which R-workers are lost and which ask to leave."""

    def abandon_step(self) -> None:
        """Drop the rows of the open step, if there is one."""

    def wait(self) -> None:
        """Wait a short while, or until a prefill worker has computed a prompt. Called after steps without rows."""

    def transfer(self, transfer: Transfer) -> float:
        """Copy cached tokens between two R-workers; return the seconds. Raise WorkerLostError if either is lost."""

    def admit(self, vacant: Sequence[int]) -> dict[int, JoinedWorker]:
        """Return the R-workers that have joined since the last call, by index. Fill ``vacant`` indices first.

        This never waits.
        """

    def dismiss(self, worker: int) -> None:
        """Disconnect R-worker ``worker``."""

    def forget(self, sequence_id: int) -> None:
        """Drop all that the S-worker keeps of sequence ``sequence_id``; unknown ids are ignored."""

    def record(self, step: ScheduledStep, report: StepReport, num_output_tokens: int, pool: Pool) -> StepRecord:
        """Return the record of the step that has just ended, with the times of the S-worker and the R-workers.
        ``pool``: the R-workers and copies after the step.
        """


class RunningCycle(Protocol):
    """The part of a running cycle that a ``Requests`` may use: the scheduler, and ``finish`` to end a sequence."""

    @property
    def scheduler(self) -> Scheduler: ...

    def finish(self, sequence: TokenSequence, reason: str) -> None:
        """End ``sequence``, which waits or runs, for ``reason``: see ``Scheduler.finish``."""


class Requests(Protocol[T_contra]):
    """The requests that receive the tokens of a cycle's steps."""

    def begun(self, step: ScheduledStep, now_seconds: float) -> None:
        """Record that the R-workers have received ``step``, which is computed next."""

    def accepted(self, step: ScheduledStep, computed: T_contra) -> Mapping[int, int]:
        """Return how many draft tokens of each sequence are accepted, by sequence id."""

    def take(
        self, cycle: RunningCycle, computed: T_contra, accepted: Mapping[int, int], spoilt: Collection[int]
    ) -> int:
        """Append the sampled tokens to all sequences except ``spoilt``; return how many were appended.
        Fork a request's further samples by the scheduler of ``cycle``, and end finished sequences with
        ``cycle.finish``.
        """

    def give_up(self, cycle: RunningCycle, sequence: TokenSequence) -> None:
        """Finish the request of ``sequence`` with an error: no remaining R-worker has memory for it.

        The scheduler has dropped the sequence already.
        """
