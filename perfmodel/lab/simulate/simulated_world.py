"""The world of a simulation: steps take the model's time, and workers join and leave by events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fastdecode.core.errors import PlanError, WorkerLostError
from fastdecode.core.metrics import Pool, StepRecord
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import StepReport
from fastdecode.cycle import JoinedWorker
from fastdecode.perfmodel.lab.simulate.events import DRAIN, JOIN, LOSE, SLOW, Timeline, WorkerEvent
from fastdecode.perfmodel.lab.simulate.prefill_fleet import SimulatedPrefills
from fastdecode.perfmodel.lab.simulate.simulated_drafts import SimulatedDrafter
from fastdecode.perfmodel.lab.simulate.simulated_machine import Machine, StepCost
from fastdecode.perfmodel.lab.simulate.tokens import Clock
from fastdecode.perfmodel.load import Load
from fastdecode.scheduler import Limits, Transfer

NO_ONE = -1
"""Marks the place of an R-worker that is lost."""


class SimulatedWorld:
    """A ``World`` for the engine's cycle that computes no tokens. A step returns which sequences it sampled.
    A machine keeps its number for the whole run. The scheduler's index of an R-worker is its place; an R-worker that
    joins takes any vacant place. An event during a step takes effect at the step's end. ``next_arrival_seconds``: the
    next request's arrival, at which waiting ends. ``happened``: number of events by kind. ``num_ignored``: events that
    could not happen, since the R-worker was absent, or was to join and present already.
    """

    def __init__(
        self,
        limits: Limits,
        machine: Machine,
        clock: Clock,
        prefills: SimulatedPrefills | None = None,
        drafter: SimulatedDrafter | None = None,
        events: Timeline | None = None,
    ) -> None:
        """``limits``: the scheduler's. ``prefills``, ``drafter``: None without prefill workers, or drafts."""
        self.machine = machine
        self.next_arrival_seconds = math.inf
        self.happened: Counter[str] = Counter()
        self.num_ignored = 0
        self._limits, self._clock = limits, clock
        self._prefills, self._drafter = prefills, drafter
        self._events = events or Timeline()
        self._first_machine = machine
        self._places = list(range(len(limits.num_blocks)))
        self._slow: dict[int, float] = {}
        self._joining: list[int] = []
        self._lost: list[int] = []
        self._leaving: set[int] = set()
        self._cost = _free(len(self._places))

    def now(self) -> float:
        """Return the simulated seconds."""
        return self._clock.now_seconds

    @property
    def next_event_seconds(self) -> float:
        """The simulated seconds at which the next event happens; infinite if no event remains."""
        return self._events.next_seconds

    def tell(self, step: ScheduledStep) -> None:
        """Accept ``step`` without effect. Raise PlanError if its prompts go to prefill workers and there are none."""
        if step.prefills and self._prefills is None:
            raise PlanError("the scheduler sends prompts to prefill workers, and the simulator was given none")

    def compute(self, step: ScheduledStep) -> np.ndarray:
        """Let the time of ``step`` pass; return the sampled sequences: int64 [n], in order of arrival."""
        batches = [mini_batch.chunks for mini_batch in step.mini_batches]
        arrived = np.array(step.arrived, np.int64)
        sampled = np.concatenate([arrived, *(chunks["sequence_id"][chunks["samples"]] for chunks in batches)])
        self._cost = self.cost(step, len(sampled) + sum(map(len, step.drafts.values())))
        self._clock.compute(self._cost.wall_seconds)
        return sampled

    def cost(self, step: ScheduledStep, num_scored_rows: int) -> StepCost:
        """Return the cost of ``step``: nothing if it only samples prompts from prefill workers."""
        if not step.num_tokens:
            return _free(len(step.kv_loads))
        kv_loads = self._drafter.kv_loads(step) if self._drafter else step.kv_loads
        return self.machine.cost(Load.of(step, num_scored_rows, sum(kv_loads)), kv_loads)

    def end_step(self) -> StepReport:
        """Report which R-workers were lost. Raise WorkerLostError if none is left."""
        self._happen()
        lost, self._lost = tuple(self._lost), []
        if lost and max(self._places) == NO_ONE:
            raise WorkerLostError(f"at {self.now():.6g} simulated seconds the last R-worker is lost: the run ends")
        return StepReport((), lost, tuple(sorted(self._leaving)))

    def abandon_step(self) -> None:
        """Do nothing, since nothing was written."""

    def wait(self) -> None:
        """Wait for prefill workers, a request or an event, whichever comes first."""
        computed = self._prefills.fleet.next_seconds if self._prefills else math.inf
        moment = min(computed, self.next_arrival_seconds, self.next_event_seconds)
        if math.isinf(moment):
            raise PlanError("no request can run: the scheduler promised room that it does not have (a bug)")
        self._clock.wait_until(moment)

    def transfer(self, transfer: Transfer) -> float:
        """Let the time of a copy pass. Raise WorkerLostError if its source or target is gone by then."""
        seconds = self.machine.seconds_per_moved_token * transfer.num_tokens
        self._clock.work(seconds)
        self._happen()
        if NO_ONE in (self._places[transfer.source], self._places[transfer.target]):
            raise WorkerLostError(f"R-worker {transfer.source} or {transfer.target} was lost while a cache was copied")
        return seconds

    def admit(self, vacant: Sequence[int]) -> dict[int, JoinedWorker]:
        """Return the R-workers that have joined, with their initial memory; a new one has as much as R-worker 0."""
        self._happen()
        found, left = {}, list(vacant)
        for worker in self._joining:
            place = left.pop(0) if left else len(self._places)
            self._places[place : place + 1] = [worker]
            found[place] = self._newcomer(worker)
        if found:
            self._joining.clear()
            self._change()
        return found

    def dismiss(self, worker: int) -> None:
        """Remove the R-worker that the scheduler numbers ``worker``."""
        self._empty(worker)
        self._change()

    def forget(self, sequence_id: int) -> None:
        """Do nothing, since nothing is kept of a sequence."""

    def record(self, step: ScheduledStep, report: StepReport, num_output_tokens: int, pool: Pool) -> StepRecord:
        """Return the record of ``step``. Copies and drafts since the previous step count as host work."""
        cost, kv_loads, between = self._cost, step.kv_loads, self._clock.take_between_seconds()
        return StepRecord(
            is_decode=step.is_decode,
            overlapped=True,
            num_tokens=step.num_tokens,
            num_output_tokens=num_output_tokens,
            kv_loads=tuple(kv_loads),
            wall_seconds=cost.wall_seconds + between,
            s_seconds=cost.s_seconds,
            wait_seconds=cost.wall_seconds - cost.s_seconds - cost.host_seconds,
            host_seconds=cost.host_seconds + between,
            r_seconds=tuple(cost.r_seconds.tolist()),
            transfer_seconds=(cost.transfer_seconds,) * len(kv_loads),
            kv_bytes_read=round(self.machine.kv_bytes_per_token * sum(kv_loads)),
            lost_workers=len(report.lost),
            num_starts=step.num_starts,
            num_prompt_tokens=step.num_prompt_rows,
            pool=pool,
        )

    def _newcomer(self, worker: int) -> JoinedWorker:
        limits = self._limits
        if worker >= len(limits.num_blocks):
            return JoinedWorker(limits.num_blocks[0], name=f"R-worker {worker}")
        host = limits.hosts[worker] if limits.hosts else ""
        return JoinedWorker(limits.num_blocks[worker], limits.bandwidths[worker], host, f"R-worker {worker}")

    def _happen(self) -> None:
        """Apply all events that are due."""
        for event in self._events.due(self.now()):
            if self._happens_to_prefill(event) if event.is_prefill else self._happens(event):
                self.happened[event.kind] += 1
            else:
                self.num_ignored += 1

    def _happens_to_prefill(self, event: WorkerEvent) -> bool:
        return self._prefills is not None and self._prefills.happen(event)

    def _happens(self, event: WorkerEvent) -> bool:
        """Apply ``event`` to its R-worker; return False if the R-worker is absent, or joins although present."""
        worker = event.worker
        is_here = worker in self._places
        if event.kind == JOIN:
            if is_here or worker in self._joining:
                return False
            self._joining.append(worker)
            return True
        if event.kind == LOSE and worker in self._joining:
            self._joining.remove(worker)
            return True
        if not is_here:
            return False
        place = self._places.index(worker)
        if event.kind == LOSE:
            self._empty(place)
            self._lost.append(place)
        elif event.kind == DRAIN:
            self._leaving.add(place)
        elif event.kind == SLOW:
            self._slow[worker] = event.factor
        self._change()
        return True

    def _empty(self, place: int) -> None:
        """Mark ``place`` as vacant. If its R-worker joins again, the R-worker has its initial speed."""
        self._slow.pop(self._places[place], None)
        self._places[place] = NO_ONE
        self._leaving.discard(place)

    def _change(self) -> None:
        if max(self._places) != NO_ONE:
            self.machine = self._first_machine.changed(self._places, self._slow)


def _free(num_workers: int) -> StepCost:
    return StepCost(0.0, 0.0, 0.0, 0.0, np.zeros(num_workers))
