"""Runs the engine's own scheduler against a model of the machine, step by step, in simulated time.

It also finds how many requests per second a machine sustains: Sarathi-Serve's capacity (section 5.1).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.core.metrics import PoolChanges, StepRecord
from fastdecode.cycle import Cycle, Membership
from fastdecode.perfmodel.lab.simulate.events import LOSE, Timeline
from fastdecode.perfmodel.lab.simulate.interruptions import Interruptions
from fastdecode.perfmodel.lab.simulate.prefill_fleet import PrefillFleet, SimulatedPrefills
from fastdecode.perfmodel.lab.simulate.simulated_drafts import SimulatedDrafter, SimulatedSpeculation
from fastdecode.perfmodel.lab.simulate.simulated_machine import Machine
from fastdecode.perfmodel.lab.simulate.simulated_requests import SimulatedRequests
from fastdecode.perfmodel.lab.simulate.simulated_world import SimulatedWorld
from fastdecode.perfmodel.lab.simulate.tokens import Clock
from fastdecode.perfmodel.lab.simulate.workload import SimulatedRequest
from fastdecode.scheduler import Scheduler

MOST_LOSSES = 100
"""Losses per R-worker, on average, without one ended request, after which a run counts as endless."""


class Simulator:
    """Runs the engine's own cycle in a simulated world, where a step only takes time.

    A request counts from the first step that begins after its arrival; tokens appear at the end of a step. ``on_step``:
    called with each record, as in the engine. ``interruptions``: the cost of losses; None without events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        machine: Machine,
        on_step: Callable[[StepRecord], None] | None = None,
        prefill: PrefillFleet | None = None,
        drafter: SimulatedDrafter | None = None,
        events: Timeline | None = None,
    ) -> None:
        """``prefill``: the forecast of prefill workers, if the scheduler's policy has some.

        ``drafter``: None without drafts. ``events``: those of R-workers and prefill workers.
        """
        self.scheduler = scheduler
        self.on_step = on_step
        self.prefill = prefill
        self.num_steps = 0
        self._num_ended = self._lost_before = 0
        self._clock = clock = Clock()
        prefills = SimulatedPrefills(prefill, clock) if prefill else None
        self.world = SimulatedWorld(scheduler.limits, machine, clock, prefills, drafter, events)
        self.requests = SimulatedRequests(clock, drafter)
        self.interruptions = Interruptions(scheduler, self.requests, clock) if events else None
        self._membership = Membership()
        speculation = SimulatedSpeculation(drafter, clock) if drafter else None
        companions = (self._membership, prefills, speculation, self.interruptions)
        self._cycle = Cycle(scheduler, self.world, self.requests, list(filter(None, companions)), self._count)

    def run(self, requests: Iterable[SimulatedRequest], until: Callable[[Simulator], bool] | None = None) -> None:
        """Run ``requests`` until all have ended, or ``until`` returns True after a step.

        Raise RequestError if one could never run, and WorkerLostError if no R-worker is left. Raise PlanError if
        R-workers are lost MOST_LOSSES times each, on average, while no request ends.
        """
        arriving = deque(sorted(requests, key=lambda request: request.arrival_seconds))
        self.requests.expect(arriving)
        try:
            while arriving or self.scheduler.has_unfinished:
                while arriving and arriving[0].arrival_seconds <= self.now_seconds:
                    self.requests.arrive(self.scheduler, arriving.popleft())
                if not self.scheduler.has_unfinished:
                    self._idle_until(arriving[0].arrival_seconds)
                    continue
                self.world.next_arrival_seconds = arriving[0].arrival_seconds if arriving else math.inf
                self._cycle.turn()
                self._check_progress()
                if until is not None and until(self):
                    return
        finally:
            self.requests.hand_out()

    @property
    def now_seconds(self) -> float:
        """The simulated seconds since the start of the run."""
        return self._clock.now_seconds

    @property
    def num_finished(self) -> int:
        """Requests that have all their tokens."""
        return self.requests.num_finished

    @property
    def changes(self) -> PoolChanges:
        """The changes of the pool of R-workers that happened between steps."""
        return self._membership.changes

    def _idle_until(self, moment: float) -> None:
        """Let time pass without work; events meanwhile are applied when they happen."""
        while self.world.next_event_seconds <= moment:
            self._clock.wait_until(self.world.next_event_seconds)
            self._cycle.look_around()
        self._clock.wait_until(moment)

    def _check_progress(self) -> None:
        if self._num_ended != (ended := self.num_finished + self.requests.num_given_up):
            self._num_ended, self._lost_before = ended, self.world.happened[LOSE]
        lost, num_r_workers = self.world.happened[LOSE] - self._lost_before, len(self.scheduler.limits.num_blocks)
        if lost > MOST_LOSSES * num_r_workers:
            raise PlanError(
                f"at {self.now_seconds:.6g} simulated seconds {num_r_workers} R-workers have been lost {lost} times "
                f"and no request has ended meanwhile: they live too short for this workload"
            )

    def _count(self, record: StepRecord) -> None:
        self.num_steps += 1
        if self.on_step is not None:
            self.on_step(record)


@dataclass(frozen=True)
class Slo:
    """Limits that define a sustainable load.

    99 of 100 times between tokens must be within ``tbt_p99_seconds``, and half of the requests must start within
    ``delay_p50_seconds`` (Sarathi-Serve's 2 s: a queue that does not grow).
    """

    tbt_p99_seconds: float
    delay_p50_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tbt_p99_seconds", "delay_p50_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 seconds and finite, not {getattr(self, name)!r}")

    def is_met(self, requests: Sequence[SimulatedRequest]) -> bool:
        """Return whether ``requests`` meet these limits. If a request has not ended, return False."""
        if not all(request.finished for request in requests):
            return False
        delay = np.median([request.scheduling_delay_seconds for request in requests])
        gaps = np.concatenate([request.seconds_between_tokens for request in requests])
        slow = np.percentile(gaps, 99) > self.tbt_p99_seconds if len(gaps) else False
        return bool(delay <= self.delay_p50_seconds and not slow)

    def is_lost(self, requests: Sequence[SimulatedRequest], now_seconds: float) -> bool:
        """Return whether more than half of ``requests`` waited longer than ``delay_p50_seconds`` to start."""
        limit = self.delay_p50_seconds
        late = sum(
            (now_seconds if request.start_seconds is None else request.start_seconds) - request.arrival_seconds > limit
            for request in requests
        )
        return 2 * late > len(requests) + 1


def find_capacity(meets: Callable[[float], bool], first_guess: float, tolerance: float = 0.02) -> float:
    """Return the highest rate for which ``meets`` is true, at most ``tolerance`` (relative) too low.
    The search doubles or halves ``first_guess``, then bisects. Return 0 if not even a 4096th of ``first_guess`` is
    sustained. Return infinity if 4096 times ``first_guess`` is; then there are too few requests to form a queue.
    """
    if not first_guess > 0 or not tolerance > 0:
        raise ConfigError(f"a capacity is sought from a rate above 0, not {first_guess!r}")
    low, high = 0.0, math.inf
    rate = first_guess
    # Doublings from the first guess before a search ends
    most_doublings = 12
    for _ in range(most_doublings + 1):
        low, high = (rate, high) if meets(rate) else (low, rate)
        if low > 0 and high < math.inf:
            break
        rate = 2 * low if low > 0 else high / 2
    else:
        return math.inf if low > 0 else 0.0
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
