"""Prefill workers in simulated time."""

from __future__ import annotations

import heapq
import math

from fastdecode.core.remote_prefill import RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import Companion, Cycle
from fastdecode.perfmodel.lab.simulate.events import DRAIN, JOIN, LOSE, WorkerEvent
from fastdecode.perfmodel.lab.simulate.tokens import Clock
from fastdecode.perfmodel.partition import Forecast


class PrefillFleet:
    """Computes prompts in the time of ``forecast``. Each worker takes its parts in the order of the jobs."""

    def __init__(self, forecast: Forecast, num_workers: int) -> None:
        """``num_workers``: workers of equal speed."""
        self.forecast, self.num_workers = forecast, num_workers
        self.busy_seconds = 0.0
        self.num_prompts = 0
        self._free = dict.fromkeys(range(num_workers), 0.0)
        self._slowness: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []
        self._part_ends: dict[int, dict[int, float]] = {}

    def submit(self, prefill: RemotePrefill, now_seconds: float) -> None:
        """Start the prompt ``prefill`` at ``now_seconds``, or once all its workers are free."""
        rows = [part.end - part.start for part in prefill.parts]
        speeds = [1.0 / self._slowness.get(part.worker, 1.0) for part in prefill.parts]
        start = max(now_seconds, *(self._free[part.worker] for part in prefill.parts))
        ends = self.forecast.seconds(rows, speeds, prefill.context_len)
        for part, seconds in zip(prefill.parts, ends, strict=True):
            self._free[part.worker] = start + seconds
            self.busy_seconds += seconds
        self.num_prompts += 1
        heapq.heappush(self._ends, (self._free[prefill.parts[-1].worker], prefill.job_id))
        self._part_ends[prefill.job_id] = {part.worker: self._free[part.worker] for part in prefill.parts}

    def take(self, now_seconds: float) -> list[int]:
        """Return the ids of jobs that have ended by ``now_seconds``, in order."""
        ended = []
        while self._ends and self._ends[0][0] <= now_seconds:
            ended.append(heapq.heappop(self._ends)[1])
            del self._part_ends[ended[-1]]
        return ended

    @property
    def next_seconds(self) -> float:
        """The simulated seconds at which the next prompt ends; infinite if none is running."""
        return self._ends[0][0] if self._ends else math.inf

    def lose(self, worker: int, now_seconds: float) -> list[int]:
        """Remove a lost worker; return the jobs that fail with it, which its other workers drop at once."""
        failed = [job_id for end, job_id in self._ends if end > now_seconds and worker in self._part_ends[job_id]]
        self._ends = [each for each in self._ends if each[1] not in failed]
        heapq.heapify(self._ends)
        for other in {other for job_id in failed for other in self._part_ends.pop(job_id)}:
            ends = [ends[other] for ends in self._part_ends.values() if other in ends]
            self._free[other] = max(ends, default=min(self._free[other], now_seconds))
        return failed

    def join(self, worker: int, now_seconds: float) -> None:
        """Add a worker with the forecast's speed."""
        self._free[worker] = now_seconds
        self._slowness.pop(worker, None)

    def slow(self, worker: int, factor: float) -> None:
        """Make a worker ``factor`` times slower than the forecast, from the next prompt on."""
        self._slowness[worker] = factor


class SimulatedPrefills(Companion):
    """Gives prompts to a fleet of prefill workers and returns results, while its workers come and go."""

    def __init__(self, fleet: PrefillFleet, clock: Clock) -> None:
        self.fleet = fleet
        self._clock = clock
        self._present = set(range(fleet.num_workers))
        self._due: list[WorkerEvent] = []

    def happen(self, event: WorkerEvent) -> bool:
        """Apply an event to a prefill worker. The scheduler is informed of it before the next step.

        Return False if the worker is absent, or if it should join although it is present.
        """
        if (event.worker in self._present) == (event.kind == JOIN):
            return False
        if event.kind in (JOIN, LOSE, DRAIN):
            self._present ^= {event.worker}
        self._due.append(event)
        return True

    def before(self, cycle: Cycle) -> None:
        """Tell the scheduler which prompts have ended, and which workers joined or were lost."""
        now, due = self._clock.now_seconds, self._due
        self._due = []
        for event in due:
            self._pass_on(cycle, event)
        for job_id in self.fleet.take(now):
            cycle.scheduler.prefilled(job_id, now)

    def _pass_on(self, cycle: Cycle, event: WorkerEvent) -> None:
        policy = cycle.scheduler.remote_prompts.policy
        if event.kind == JOIN:
            self.fleet.join(event.worker, event.seconds)
            if policy:
                policy.joined(event.worker)
        elif event.kind in (LOSE, DRAIN):
            if policy:
                policy.lost(event.worker)
            for job_id in self.fleet.lose(event.worker, event.seconds) if event.kind == LOSE else ():
                cycle.scheduler.prefill_failed(job_id, self._clock.now_seconds)
        else:
            self.fleet.slow(event.worker, event.factor)

    def begun(self, step: ScheduledStep) -> None:
        """Submit the prompts that ``step`` gives to prefill workers."""
        for prefill in step.prefills:
            self.fleet.submit(prefill, self._clock.now_seconds)
