"""Runs the live scheduler against a model of the machine, step by step, in simulated time.

And how many requests per second a machine sustains: Sarathi-Serve's capacity (section 5.1).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as PySequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.core.metrics import StepRecord
from fastdecode.core.remote_prefill import RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.simulate.machine import Machine, StepCost
from fastdecode.perfmodel.simulate.prefill import PrefillFleet
from fastdecode.perfmodel.simulate.speculation import SimulatedDrafter
from fastdecode.perfmodel.simulate.tokens import SimulatedOutput, TokenTimes
from fastdecode.perfmodel.simulate.workload import SimulatedRequest
from fastdecode.scheduler import Scheduler, Sequence


class Simulator:
    """Does with a scheduler what the engine does, and instead of computing a step lets its time pass.

    A request is heard of at the first step that begins after its arrival; tokens appear at the end of a step.
    ``on_step`` is called with the record of each, as the engine's is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        machine: Machine,
        on_step: Callable[[StepRecord], None] | None = None,
        prefill: PrefillFleet | None = None,
        drafter: SimulatedDrafter | None = None,
    ) -> None:
        """``prefill``: the prefill workers of the scheduler's policy, where it has one; ``drafter``: likewise."""
        self.scheduler = scheduler
        self.machine = machine
        self.on_step = on_step
        self.prefill = prefill
        self.drafter = drafter
        self.now_seconds = 0.0
        self.num_steps = self.num_moves = 0
        self.num_copies_made = 0
        self._step_seconds = 0.0
        self._requests: list[SimulatedRequest] = []
        self._sequences: list[Sequence] = []
        self._num_finished = 0
        self._tokens = TokenTimes()

    def run(self, requests: Iterable[SimulatedRequest], until: Callable[[Simulator], bool] | None = None) -> None:
        """Run ``requests`` until all have ended, or until ``until`` says after a step that it has seen enough.

        RequestError where one could never run.
        """
        arriving = deque(sorted(requests, key=lambda request: request.arrival_seconds))
        self._tokens.expect([request.output_len for request in arriving])
        try:
            while arriving or self.scheduler.has_unfinished:
                while arriving and arriving[0].arrival_seconds <= self.now_seconds:
                    self._add(arriving.popleft())
                if not self.scheduler.has_unfinished:
                    self.now_seconds = arriving[0].arrival_seconds
                    continue
                self._step(arriving[0].arrival_seconds if arriving else math.inf)
                if until is not None and until(self):
                    return
        finally:
            for sequence_id, request in enumerate(self._requests):
                request.token_seconds = self._tokens.of(sequence_id)

    @property
    def num_finished(self) -> int:
        """Requests that have all their tokens."""
        return self._num_finished

    def _add(self, request: SimulatedRequest) -> None:
        sequence_id = len(self._requests)
        most = request.max_tokens or request.output_len
        output: Any = SimulatedOutput(self._tokens, sequence_id)  # what the scheduler reads of a list, and no more
        sequence = Sequence(sequence_id, request.prompt_token_ids, most, output_token_ids=output)
        sequence.may_stop = most > request.output_len
        self.scheduler.add(sequence)
        self._requests.append(request)
        self._sequences.append(sequence)

    def _step(self, next_arrival_seconds: float) -> None:
        moving_seconds = self._move()
        self._hear_of_prompts()
        drafting_seconds = self._draft()
        step = self.scheduler.schedule(self.now_seconds)
        for prefill in step.prefills:
            self._submit(prefill)
        if not step.num_tokens and not step.arrived:
            self._wait(step, next_arrival_seconds)
            return
        self._note_starts(step)
        sampled = _sampled_ids(step)
        cost = self._cost(step, len(sampled) + sum(map(len, step.drafts.values())))
        self.now_seconds += cost.wall_seconds
        self._step_seconds = cost.wall_seconds + drafting_seconds
        accepted = self.drafter.accepted(step.drafts) if self.drafter else {}
        self.scheduler.commit(step, accepted)
        num_output_tokens = self._take(sampled, accepted)
        wait_seconds = cost.wall_seconds - cost.s_seconds - cost.host_seconds
        self.scheduler.observe(step, cost.s_seconds, wait_seconds, cost.r_seconds.tolist())
        self.num_steps += 1
        if self.on_step is not None:
            self.on_step(self._record(step, cost, num_output_tokens, moving_seconds + drafting_seconds))

    def _draft(self) -> float:
        """As ``Speculation.draft`` does before a step; returns the seconds it takes."""
        wanted = self.scheduler.drafts_wanted() if self.drafter else {}
        if self.drafter is None or not wanted:
            return 0.0
        self.scheduler.propose(self.drafter.propose(wanted))
        kv_tokens = sum(self._sequences[sequence_id].num_cached for sequence_id in wanted)
        seconds = self.drafter.seconds(wanted, kv_tokens)
        if policy := self.scheduler.drafts.policy:
            policy.observe_drafting(len(wanted), max(wanted.values()), seconds)
        self.now_seconds += seconds
        return seconds

    def _cost(self, step: ScheduledStep, num_scored_rows: int) -> StepCost:
        """Nothing where a step has no rows and only samples what prefill workers computed."""
        if not step.num_tokens:
            return StepCost(0.0, 0.0, 0.0, 0.0, np.zeros(len(step.kv_loads)))
        kv_loads = self.drafter.kv_loads(step) if self.drafter else step.kv_loads
        return self.machine.cost(Load.of(step, num_scored_rows, sum(kv_loads)), kv_loads)

    def _hear_of_prompts(self) -> None:
        for job_id in self.prefill.take(self.now_seconds) if self.prefill else ():
            self.scheduler.prefilled(job_id, self.now_seconds)

    def _submit(self, prefill: RemotePrefill) -> None:
        if self.prefill is None:
            raise PlanError("the scheduler sends prompts to prefill workers, and the simulator was given none")
        self.prefill.submit(prefill, self.now_seconds)
        self._start(prefill.sequence_id)

    def _wait(self, step: ScheduledStep, next_arrival_seconds: float) -> None:
        """Only prefill workers have something to do."""
        moment = min(self.prefill.next_seconds if self.prefill else math.inf, next_arrival_seconds)
        if self.prefill is None or math.isinf(moment):
            raise PlanError("no request can run: the scheduler promised room that it does not have (a bug)")
        self.scheduler.commit(step)
        self.now_seconds = max(self.now_seconds, moment)

    def _move(self) -> float:
        """As ``Membership`` moves sequences, and for as long; returns the seconds that no step ran."""
        start = self.now_seconds
        while self.now_seconds - start <= self._step_seconds and (move := self.scheduler.next_transfer()):
            self.scheduler.controls_alone()
            seconds = self.machine.seconds_per_moved_token * move.num_tokens
            self.now_seconds += seconds
            ends = move.num_copied + move.num_tokens == move.segment.num_tokens
            self.num_moves += move.is_move
            self.num_copies_made += not move.is_move and ends  # of several pieces perhaps
            self.scheduler.transferred(move, seconds)
        return self.now_seconds - start

    def _note_starts(self, step: ScheduledStep) -> None:
        for mini_batch in step.mini_batches:
            for sequence_id in mini_batch.prompts["sequence_id"].tolist():
                self._start(sequence_id)

    def _start(self, sequence_id: int) -> None:
        request = self._requests[sequence_id]
        if request.start_seconds is None:
            request.start_seconds = self.now_seconds

    def _take(self, sampled_ids: np.ndarray, accepted: dict[int, int]) -> int:
        """One token for each sequence that was sampled, and those ``accepted``; returns how many.

        Thousands are sampled, so arrays do most of it.
        """
        before = self._tokens.total
        self._tokens.add(accepted, self.now_seconds)
        for sequence_id in self._tokens.take(sampled_ids, self.now_seconds).tolist():
            sequence = self._sequences[sequence_id]
            was_cut = self._requests[sequence_id].output_len == sequence.max_tokens
            self.scheduler.finish(sequence, "length" if was_cut else "stop")
            self._num_finished += 1
        return self._tokens.total - before

    def _record(
        self, step: ScheduledStep, cost: StepCost, num_output_tokens: int, between_seconds: float
    ) -> StepRecord:
        kv_loads = step.kv_loads
        return StepRecord(
            is_decode=step.is_decode,
            overlapped=True,
            num_tokens=step.num_tokens,
            num_output_tokens=num_output_tokens,
            kv_loads=tuple(kv_loads),
            wall_seconds=cost.wall_seconds + between_seconds,
            s_seconds=cost.s_seconds,
            wait_seconds=cost.wall_seconds - cost.s_seconds - cost.host_seconds,
            host_seconds=cost.host_seconds + between_seconds,
            r_seconds=tuple(cost.r_seconds.tolist()),
            transfer_seconds=(cost.transfer_seconds,) * len(kv_loads),
            kv_bytes_read=self.machine.kv_bytes_per_token * sum(kv_loads),
            num_starts=step.num_starts,
            num_copies=self.scheduler.residents.num_copies,
        )


def _sampled_ids(step: ScheduledStep) -> np.ndarray:
    """int64 [num_output_tokens]."""
    batches = [mini_batch.chunks for mini_batch in step.mini_batches]
    arrived = np.array(step.arrived, np.int64)
    return np.concatenate([arrived, *(chunks["sequence_id"][chunks["samples"]] for chunks in batches)])


MOST_DOUBLINGS = 12
"""Away from the first guess, before a search gives up."""


@dataclass(frozen=True)
class Slo:
    """What makes a load sustainable: 99 in 100 times between tokens within ``tbt_p99_seconds``, and half of the
    requests started within ``delay_p50_seconds`` (Sarathi-Serve's 2 s: a queue that does not grow)."""

    tbt_p99_seconds: float
    delay_p50_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tbt_p99_seconds", "delay_p50_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 seconds and finite, not {getattr(self, name)!r}")

    def is_met(self, requests: PySequence[SimulatedRequest]) -> bool:
        """Over all of ``requests``; one that has not ended, or never started, does not meet it."""
        if not all(request.finished for request in requests):
            return False
        delay = np.median([request.scheduling_delay_seconds for request in requests])
        gaps = np.concatenate([request.seconds_between_tokens for request in requests])
        slow = np.percentile(gaps, 99) > self.tbt_p99_seconds if len(gaps) else False
        return bool(delay <= self.delay_p50_seconds and not slow)

    def is_lost(self, requests: PySequence[SimulatedRequest], now_seconds: float) -> bool:
        """True as soon as so many have waited so long that the median delay cannot be met any more."""
        limit = self.delay_p50_seconds
        late = sum(
            (now_seconds if request.start_seconds is None else request.start_seconds) - request.arrival_seconds > limit
            for request in requests
        )
        return 2 * late > len(requests) + 1


def find_capacity(meets: Callable[[float], bool], first_guess: float, tolerance: float = 0.02) -> float:
    """The largest rate, to a relative ``tolerance`` from below, that ``meets``, by doubling and bisection.

    0 where not even a 4096th of ``first_guess`` does; infinite where 4096 times as much still does, which says that
    there were too few requests for a queue to show.
    """
    if not first_guess > 0 or not tolerance > 0:
        raise ConfigError(f"a capacity is sought from a rate above 0, not {first_guess!r}")
    low, high = 0.0, math.inf
    rate = first_guess
    for _ in range(MOST_DOUBLINGS + 1):
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
