"""The requests of an engine as its cycle meets them: tokens are appended, and what has ended is finished."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Mapping, Sequence

from fastdecode.api.outputs import RequestOutput
from fastdecode.api.request import Completion, InFlight, Request
from fastdecode.core.metrics import HOST, StateClock
from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import Cycle
from fastdecode.drafting.speculation import num_accepted
from fastdecode.scheduler import Sequence as ScheduledSequence
from fastdecode.sworker.sampling import SampledToken

logger = logging.getLogger(__name__)

Sampled = dict[int, list[SampledToken]]
"""The tokens that a step sampled, by sequence: one per completion, or one per draft token and one more."""


class LiveRequests:
    """``Requests`` of an engine; ``in_flight`` holds those that have not ended."""

    def __init__(self, in_flight: InFlight, eos_token_ids: frozenset[int], clock: StateClock) -> None:
        self.in_flight = in_flight
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._grown: dict[str, Request] = {}
        self._given_up: list[Request] = []

    def begun(self, step: ScheduledStep, now_seconds: float) -> None:
        """See ``Requests``: those whose prompt begins with this step have waited until now."""
        if not step.num_starts:
            return
        here = [int(chunk["sequence_id"]) for part in step.mini_batches for chunk in part.prompts]
        for sequence_id in (*here, *(each.sequence_id for each in step.prefills)):
            request, _ = self.in_flight.family(sequence_id)
            request.started_seconds = request.started_seconds or now_seconds

    def accepted(self, step: ScheduledStep, computed: Sampled) -> dict[int, int]:
        """See ``Requests``."""
        return {each: num_accepted(computed[each], tokens) for each, tokens in step.drafts.items()}

    def take(self, cycle: Cycle, computed: Sampled, accepted: Mapping[int, int], spoilt: Collection[int]) -> int:
        """See ``Requests``."""
        now = self._clock.enter(HOST)
        grown: dict[str, Request] = {}
        num_tokens = 0
        for sequence_id, tokens in computed.items():
            if sequence_id in spoilt:
                continue
            kept = tokens[: 1 + accepted[sequence_id]] if sequence_id in accepted else tokens
            request, count = self._append(cycle, sequence_id, kept, accepted)
            num_tokens += count
            grown[request.request_id] = request
        for request in grown.values():
            request.token_seconds.append(now)
            if request.finished:
                self.in_flight.remove(request.request_id)
        self._grown |= grown
        return num_tokens

    def give_up(self, cycle: Cycle, sequence: ScheduledSequence) -> None:
        """See ``Requests``."""
        request, completions = self.in_flight.family(sequence.sequence_id)
        for completion in completions:
            completion.stop_reason = "no R-worker that is left has room for it"
            self._finish(cycle, completion, "error")
        logger.error("request %s: no R-worker that is left has room for it", request.request_id)
        if request.finished:
            self._given_up.append(request)
            self.in_flight.remove(request.request_id)

    def abort(self, cycle: Cycle, request_id: str) -> None:
        """Drop a request, waiting or running; unknown ones are ignored."""
        request = self.in_flight.remove(request_id)
        for completion in request.completions if request else ():
            if completion.finish_reason is None:
                self._finish(cycle, completion, "abort")

    def take_outputs(self) -> list[RequestOutput]:
        """Snapshots of the requests that grew or were given up since the last call."""
        outputs = [request.output() for request in (*self._grown.values(), *self._given_up)]
        self._grown.clear()
        self._given_up.clear()
        return outputs

    def _append(
        self, cycle: Cycle, sequence_id: int, tokens: list[SampledToken], drafted: Container[int]
    ) -> tuple[Request, int]:
        """The request of ``sequence_id``, which grows, and by how many tokens. Those of a sequence in ``drafted``
        follow each other; another's are of one place, for a completion each."""
        request, completions = self.in_flight.family(sequence_id)
        if len(completions) > 1:
            cycle.scheduler.store.fork_siblings(completions[0].sequence)
        following = [tokens] if sequence_id in drafted else [[token] for token in tokens]
        pairs = zip(completions, following, strict=True)
        return request, sum(self._grow(cycle, request, each, its_tokens) for each, its_tokens in pairs)

    def _grow(self, cycle: Cycle, request: Request, completion: Completion, tokens: Sequence[SampledToken]) -> int:
        """Append ``tokens`` up to one that ends ``completion``; returns how many that were."""
        for count, token in enumerate(tokens, 1):
            completion.append(token, request.params, self._eos_token_ids)
            if completion.finish_reason is not None:
                self._finish(cycle, completion, completion.finish_reason)
                return count
        return len(tokens)

    def _finish(self, cycle: Cycle, completion: Completion, reason: str) -> None:
        completion.finish_reason = reason
        self.in_flight.end(completion)
        cycle.finish(completion.sequence, reason)
