"""What a journal says of requests, and how a request is brought to where it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from fastdecode.api.request import Request
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.core.errors import ConfigError
from fastdecode.journal.records import Asked, Dropped, Record, Stepped, TokenLogprobs
from fastdecode.scheduler import Sequence
from fastdecode.sworker.sampling import SampledToken

Ended = tuple[str, int | str | None]
"""Finish reason and stop reason."""


@dataclass
class Sample:
    """One output of a request: tokens, log-probabilities where they were asked for, and how it ended, if it has."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=list)
    ended: Ended | None = None


@dataclass
class Past:
    """A request as it was asked, and its ``samples``, by number."""

    asked: Asked
    samples: list[Sample]

    @property
    def num_tokens(self) -> int:
        """Of prompt and outputs."""
        return len(self.asked.prompt_token_ids) + sum(len(sample.token_ids) for sample in self.samples)

    @property
    def ended(self) -> bool:
        """Whether all its outputs have."""
        return all(sample.ended for sample in self.samples)

    @property
    def end_id(self) -> int:
        """The first id after those of its sequences."""
        return self.asked.sequence_id + len(self.samples)

    def cached_tokens(self) -> dict[int, list[int]]:
        """By sequence the tokens that may be cached: of prompt and output all but the last, whose row samples the next.

        What R-workers have beyond these are draft tokens that were refused, or rows of a step that is not written here.
        """
        prompt = self.asked.prompt_token_ids
        return {
            self.asked.sequence_id + index: (prompt + sample.token_ids)[:-1]
            for index, sample in enumerate(self.samples)
            if not sample.ended
        }

    def is_of(self, prompt_token_ids: list[int], params: SamplingParams) -> bool:
        """Whether this is what is asked now."""
        try:
            return self.asked.prompt_token_ids == prompt_token_ids and _params_of(self.asked.params) == params
        except (ConfigError, TypeError):  # of another version
            return False

    def replay(self, request: Request) -> list[Sequence]:
        """Bring ``request``, just made of the same prompt and parameters, to where it was; returns what is to run."""
        for completion, sample in zip(request.completions, self.samples, strict=True):
            for index, token_id in enumerate(sample.token_ids):
                logprob = sample.logprobs[index] if sample.logprobs else None
                completion.append(SampledToken(token_id, logprob), request.params, request.eos_token_ids)
            if sample.ended and completion.finish_reason is None:
                completion.finish_reason, completion.stop_reason = sample.ended
        first = request.completions[0].sequence
        if not any(sample.token_ids or sample.ended for sample in self.samples):
            return [first]
        first.siblings = ()
        return [each.sequence for each in request.completions if each.finish_reason is None]

    def records(self) -> list[Record]:
        """What says the same as all that was read of it."""
        ids = range(self.asked.sequence_id, self.end_id)
        by_id = list(zip(ids, self.samples, strict=True))
        step = Stepped(
            [(each, sample.token_ids) for each, sample in by_id if sample.token_ids],
            [(each, sample.logprobs) for each, sample in by_id if sample.logprobs],
            [(each, *sample.ended) for each, sample in by_id if sample.ended],
        )
        return [self.asked, step] if step.tokens or step.ended else [self.asked]


def pasts_of(records: Iterable[Record]) -> dict[int, Past]:
    """The requests of a journal's records that were not dropped, by the id of their first sequence."""
    pasts: dict[int, Past] = {}
    samples: dict[int, Sample] = {}
    for record in records:
        if isinstance(record, Asked):
            pasts[record.sequence_id] = past = Past(record, [Sample() for _ in range(record.params.get("n", 1))])
            samples |= zip(range(record.sequence_id, past.end_id), past.samples, strict=True)
        elif isinstance(record, Dropped):
            pasts.pop(record.sequence_id, None)
        elif isinstance(record, Stepped):
            for sequence_id, token_ids in record.tokens:
                samples[sequence_id].token_ids += token_ids
            for sequence_id, logprobs in record.logprobs:
                samples[sequence_id].logprobs += logprobs
            for sequence_id, finish_reason, stop_reason in record.ended:
                samples[sequence_id].ended = finish_reason, stop_reason
    return pasts


def asked(request: Request) -> Asked:
    """The record of ``request``."""
    params = {each.name: getattr(request.params, each.name) for each in fields(SamplingParams)}
    given = {name: value for name, value in params.items() if value != getattr(_DEFAULTS, name)}
    first = request.completions[0].sequence.sequence_id
    return Asked(first, request.request_id, request.prompt, request.prompt_token_ids, given)


_DEFAULTS = SamplingParams()


def _params_of(given: dict[str, Any]) -> SamplingParams:
    form = given.get("structured_outputs")
    return SamplingParams(**given | ({"structured_outputs": StructuredOutputsParams(**form)} if form else {}))
