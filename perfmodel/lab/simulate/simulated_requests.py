"""Holds the requests of a simulation in the form that the engine's cycle uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import RunningCycle
from fastdecode.perfmodel.lab.simulate.simulated_drafts import SimulatedDrafter
from fastdecode.perfmodel.lab.simulate.tokens import Clock, SimulatedOutput, TokenTimes
from fastdecode.perfmodel.lab.simulate.workload import SimulatedRequest
from fastdecode.scheduler import Scheduler, TokenSequence


class SimulatedRequests:
    """Counts requests' tokens and records their times. A request has one sequence, whose id is the request's number.

    ``num_finished``: requests with all their tokens. ``num_given_up``: requests for which no remaining R-worker had
    room.
    """

    def __init__(self, clock: Clock, drafter: SimulatedDrafter | None = None) -> None:
        self.num_finished = self.num_given_up = 0
        self._clock, self._drafter = clock, drafter
        self._requests: list[SimulatedRequest] = []
        self._sequences: list[TokenSequence] = []
        self._tokens = TokenTimes()

    def __len__(self) -> int:
        """Return how many requests have arrived."""
        return len(self._requests)

    def __getitem__(self, sequence_id: int) -> TokenSequence:
        return self._sequences[sequence_id]

    def expect(self, requests: Sequence[SimulatedRequest]) -> None:
        """Announce requests, which will arrive in this order."""
        self._tokens.expect([request.output_len for request in requests])

    def arrive(self, scheduler: Scheduler, request: SimulatedRequest) -> None:
        """Add ``request`` to the ``scheduler``'s queue. Raise RequestError if the request could never run."""
        sequence_id = len(self._requests)
        most = request.max_tokens or request.output_len
        output: Any = SimulatedOutput(self._tokens, sequence_id)  # behaves like a list of tokens
        sequence = TokenSequence(sequence_id, request.prompt_token_ids, most, output_token_ids=output)
        sequence.may_stop = most > request.output_len
        scheduler.add(sequence)
        self._requests.append(request)
        self._sequences.append(sequence)

    def token_seconds(self, sequence_id: int) -> np.ndarray:
        """Return the times of a request's tokens, float64 [tokens so far]."""
        return self._tokens.of(sequence_id)

    def hand_out(self) -> None:
        """Copy the times of each request's tokens into the request, at the end of the run."""
        for sequence_id, request in enumerate(self._requests):
            request.token_seconds = self._tokens.of(sequence_id)

    def begun(self, step: ScheduledStep, now_seconds: float) -> None:
        """Record the start of requests whose prompts begin in ``step``."""
        if not (step.num_starts or step.prefills):
            return
        here = [each for mini_batch in step.mini_batches for each in mini_batch.prompts["sequence_id"].tolist()]
        for sequence_id in (*here, *(each.sequence_id for each in step.prefills)):
            request = self._requests[sequence_id]
            if request.start_seconds is None:
                request.start_seconds = now_seconds

    def accepted(self, step: ScheduledStep, computed: np.ndarray) -> Mapping[int, int]:
        """Draw how many drafts of each sequence are accepted."""
        return self._drafter.accepted(step.drafts) if self._drafter else {}

    def take(
        self, cycle: RunningCycle, computed: np.ndarray, accepted: Mapping[int, int], spoilt: Collection[int]
    ) -> int:
        """Count one token for each sequence in ``computed``, and the ``accepted`` drafts; return how many tokens.

        A step may sample thousands of sequences, so arrays do most of the work.
        """
        if spoilt:
            computed = computed[~np.isin(computed, list(spoilt))]
            accepted = {each: count for each, count in accepted.items() if each not in spoilt}
        before, now = self._tokens.total, self._clock.now_seconds
        self._tokens.add(accepted, now)
        for sequence_id in self._tokens.take(computed, now).tolist():
            sequence = self._sequences[sequence_id]
            was_cut = self._requests[sequence_id].output_len == sequence.max_tokens
            cycle.finish(sequence, "length" if was_cut else "stop")
            self.num_finished += 1
        return self._tokens.total - before

    def give_up(self, cycle: RunningCycle, sequence: TokenSequence) -> None:
        """Count a request that ends without having all its tokens."""
        self.num_given_up += 1
