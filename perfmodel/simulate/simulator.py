"""Runs the live scheduler against a model of the machine, step by step, in simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from fastdecode.errors import PlanError
from fastdecode.metrics import StepRecord
from fastdecode.perfmodel.simulate.machine import Machine, StepCost
from fastdecode.perfmodel.simulate.request import SimulatedRequest
from fastdecode.perfmodel.simulate.tokens import SimulatedSequence, TokenTimes
from fastdecode.scheduler import Scheduler, Sequence
from fastdecode.step import ScheduledStep


class Simulator:
    """Does with a scheduler what the engine does, and instead of computing a step lets its time pass.

    A request is heard of at the first step that begins after its arrival; tokens appear at the end of a step.
    ``on_step`` is called with the record of each, as the engine's is.
    """

    def __init__(
        self, scheduler: Scheduler, machine: Machine, on_step: Callable[[StepRecord], None] | None = None
    ) -> None:
        self.scheduler = scheduler
        self.machine = machine
        self.on_step = on_step
        self.now_seconds = 0.0
        self.num_steps = self.num_moves = 0
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
                self._step()
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
        sequence = SimulatedSequence(sequence_id, request.prompt_token_ids, most, self._tokens)
        sequence.may_stop = most > request.output_len
        self.scheduler.add(sequence)
        self._requests.append(request)
        self._sequences.append(sequence)

    def _step(self) -> None:
        moving_seconds = self._move()
        step = self.scheduler.schedule()
        if not step.num_tokens:
            raise PlanError("no request can run: the scheduler promised room that it does not have (a bug)")
        self._note_starts(step)
        kv_loads, sampled = step.kv_loads, _sampled_ids(step)
        cost = self.machine.cost(step.num_tokens, len(sampled), kv_loads)
        self.now_seconds += cost.wall_seconds
        self._step_seconds = cost.wall_seconds
        self.scheduler.commit(step)
        self._take(sampled)
        wait_seconds = cost.wall_seconds - cost.s_seconds - cost.host_seconds
        self.scheduler.observe(step, cost.s_seconds, wait_seconds, cost.r_seconds.tolist())
        self.num_steps += 1
        if self.on_step is not None:
            self.on_step(self._record(step, kv_loads, cost, len(sampled), moving_seconds))

    def _move(self) -> float:
        """As ``Membership`` moves sequences, and for as long; returns the seconds that no step ran."""
        start = self.now_seconds
        while self.now_seconds - start <= self._step_seconds and (move := self.scheduler.next_move()):
            self.scheduler.controls_alone()
            seconds = self.machine.seconds_per_moved_token * move.num_tokens
            self.now_seconds += seconds
            self.scheduler.moved(move, seconds)
            self.num_moves += 1
        return self.now_seconds - start

    def _note_starts(self, step: ScheduledStep) -> None:
        for mini_batch in step.mini_batches:
            for sequence_id in mini_batch.prompts["sequence_id"].tolist():
                request = self._requests[sequence_id]
                if request.start_seconds is None:
                    request.start_seconds = self.now_seconds

    def _take(self, sampled_ids: np.ndarray) -> None:
        """One token for everybody who sampled. Thousands do: what can be is done on arrays."""
        for sequence_id in self._tokens.take(sampled_ids, self.now_seconds).tolist():
            sequence = self._sequences[sequence_id]
            was_cut = self._requests[sequence_id].output_len == sequence.max_tokens
            self.scheduler.finish(sequence, "length" if was_cut else "stop")
            self._num_finished += 1

    def _record(
        self, step: ScheduledStep, kv_loads: list[int], cost: StepCost, num_output_tokens: int, moving_seconds: float
    ) -> StepRecord:
        return StepRecord(
            is_decode=step.is_decode,
            overlapped=True,
            num_tokens=step.num_tokens,
            num_output_tokens=num_output_tokens,
            kv_loads=tuple(kv_loads),
            wall_seconds=cost.wall_seconds + moving_seconds,
            s_seconds=cost.s_seconds,
            wait_seconds=cost.wall_seconds - cost.s_seconds - cost.host_seconds,
            host_seconds=cost.host_seconds + moving_seconds,
            r_seconds=tuple(cost.r_seconds.tolist()),
            transfer_seconds=(cost.transfer_seconds,) * len(kv_loads),
            kv_bytes_read=self.machine.kv_bytes_per_token * sum(kv_loads),
            num_starts=step.num_starts,
        )


def _sampled_ids(step: ScheduledStep) -> np.ndarray:
    """int64 [num_output_tokens]."""
    batches = [mini_batch.chunks for mini_batch in step.mini_batches]
    return np.concatenate([chunks["sequence_id"][chunks["samples"]] for chunks in batches])
