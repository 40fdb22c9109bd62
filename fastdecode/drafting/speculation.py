"""Drafts tokens between two steps of the engine's cycle."""

from __future__ import annotations

from fastdecode.api.request import InFlight
from fastdecode.core.metrics import MODEL, WAIT, StateClock
from fastdecode.core.protocols import Drafter, DraftRequest
from fastdecode.cycle import Companion, Cycle


class Speculation(Companion):
    """Drafts tokens for the next step of an engine.

    The step accepts a draft token if the sampler draws the same token from the model's logits. So tokens, seeds and
    log-probabilities equal those of decoding without drafts. For a drafter that names one token this is rejection
    sampling (Leviathan et al., 2023; Chen et al., 2023): token d is accepted with the model's probability p(d);
    otherwise another token x is drawn with probability p(x) / (1 - p(d)).

    ``s_seconds``, ``wait_seconds``: the last drafting's seconds of model code, and of waiting for R-workers.
    """

    def __init__(self, drafter: Drafter, in_flight: InFlight, clock: StateClock) -> None:
        self.drafter = drafter
        self.s_seconds = self.wait_seconds = 0.0
        self._clock = clock
        self._in_flight = in_flight

    def prepare(self, cycle: Cycle) -> None:
        """Draft tokens for the sequences that the scheduler chooses, as many as it grants to each."""
        self.s_seconds = self.wait_seconds = 0.0
        scheduler = cycle.scheduler
        wanted = scheduler.drafts.grant()
        if not wanted:
            return
        start, before = cycle.world.now(), self._clock.snapshot()
        proposed = self.drafter.propose([self._request(*each) for each in wanted.items()], scheduler)
        drafts = {each: self._in_flight.completion(each).fitting(tokens) for each, tokens in proposed.items() if tokens}
        scheduler.drafts.propose(drafts)
        after = self._clock.snapshot()
        self.s_seconds, self.wait_seconds = (after[state] - before[state] for state in (MODEL, WAIT))
        policy = scheduler.drafts.policy
        # If drafts are missing, the drafter has computed prompts instead: that time would mislead the policy.
        if policy and len(proposed) == len(wanted):
            policy.observe_drafting(len(wanted), max(wanted.values()), cycle.world.now() - start)

    def forget(self, sequence_id: int) -> None:
        self.drafter.forget(sequence_id)

    def _request(self, sequence_id: int, num_drafts: int) -> DraftRequest:
        completion = self._in_flight.completion(sequence_id)
        sequence = completion.sequence
        tail = sequence.tail
        return DraftRequest(
            sequence_id,
            sequence.prompt_token_ids,
            sequence.output_token_ids,
            num_drafts,
            sequence.worker,
            sequence.num_cached,
            self._in_flight.sampling_rows(sequence_id)[0],
            tail.cache_id,
            tail.start,
            tuple((each.home, each.cache_id, each.start) for each in sequence.closed),
        )
