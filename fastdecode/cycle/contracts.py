"""What a cycle runs in and for: the world that computes its steps, and the requests that get the tokens."""

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
    """An R-worker that has joined. ``bandwidth``: in the unit of the others; None: their mean."""

    num_blocks: int
    bandwidth: float | None = None
    host: str = ""
    name: str = ""


class World(Protocol[T_co]):
    """The machine that the steps run on: real, simulated, or the naive one of the tests."""

    def now(self) -> float:
        """Return seconds of this world's clock."""

    def tell(self, step: ScheduledStep) -> None:
        """Have the R-workers hear the controls of ``step`` and prepare its rows; errors leave all as it was."""

    def compute(self, step: ScheduledStep) -> T_co:
        """Compute the rows of ``step``, and what follows from them."""

    def end_step(self) -> StepReport:
        """Commit what was told; which R-workers are gone, and which ask to go."""

    def abandon_step(self) -> None:
        """Forget the rows of the step that is open, if one is."""

    def wait(self) -> None:
        """Let time pass, since a step had no rows: until a prompt was computed elsewhere, or a while."""

    def transfer(self, transfer: Transfer) -> float:
        """Copy cached tokens from one R-worker to another; returns the seconds. WorkerLostError if one is gone."""

    def admit(self, vacant: Sequence[int]) -> dict[int, JoinedWorker]:
        """Return R-workers that have joined since, by index: the ``vacant`` places first, then new ones.

        Never waits.
        """

    def dismiss(self, worker: int) -> None:
        """Let R-worker ``worker`` go."""

    def forget(self, sequence_id: int) -> None:
        """Keep nothing of a sequence on the S-worker's side; unknown ones are ignored."""

    def record(self, step: ScheduledStep, report: StepReport, num_output_tokens: int, pool: Pool) -> StepRecord:
        """Put together how long each side worked on the step that has just ended, after which ``pool`` is there."""


class RunningCycle(Protocol):
    """A cycle as its requests see it: they fork samples with its scheduler, and end sequences with it."""

    @property
    def scheduler(self) -> Scheduler: ...

    def finish(self, sequence: TokenSequence, reason: str) -> None:
        """End ``sequence``, wherever it is, for ``reason``: see ``Scheduler.finish``."""


class Requests(Protocol[T_contra]):
    """Those that the tokens are for."""

    def begun(self, step: ScheduledStep, now_seconds: float) -> None:
        """The R-workers have heard ``step``; it is computed next."""

    def accepted(self, step: ScheduledStep, computed: T_contra) -> Mapping[int, int]:
        """Return how many draft tokens of each sequence are its next output tokens."""

    def take(
        self, cycle: RunningCycle, computed: T_contra, accepted: Mapping[int, int], spoilt: Collection[int]
    ) -> int:
        """Append the tokens of all sequences but ``spoilt``, fork with the scheduler and finish with ``cycle``; returns
        how many tokens were appended."""

    def give_up(self, cycle: RunningCycle, sequence: TokenSequence) -> None:
        """No R-worker that is left has room for ``sequence``: finish all of its request with ``cycle``. The scheduler
        has forgotten it."""
