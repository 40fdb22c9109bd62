"""Requests read from an earlier engine's journal, and their replay in a later engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from fastdecode.api.request import Request
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.core.errors import ConfigError
from fastdecode.core.held import KnownTokens, Named, Reached
from fastdecode.journal.records import Asked, Dropped, Placed, Record, Stepped, TokenLogprobs
from fastdecode.scheduler import TokenSequence
from fastdecode.sworker.sampling import SampledToken

Ended = tuple[str, int | str | None]
"""The finish reason and stop reason of an output."""


@dataclass
class Sample:
    """One sample of a request: tokens, log-probabilities if requested, and how it ended.
    ``reached``: number of tokens that R-workers have cached, if recorded after the sample's last token; else None.
    ``names``: the cache ids, besides the sequence id, under which R-workers may have cached these tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=list)
    ended: Ended | None = None
    reached: int | None = None
    names: dict[int, Named] = field(default_factory=dict)


@dataclass
class Past:
    """A request in a journal, with its ``samples`` in the order of their sequence ids."""

    asked: Asked
    samples: list[Sample]

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens plus the output tokens of all samples."""
        return len(self.asked.prompt_token_ids) + sum(len(sample.token_ids) for sample in self.samples)

    @property
    def ended(self) -> bool:
        """True if all outputs of the request have ended."""
        return all(sample.ended for sample in self.samples)

    @property
    def end_id(self) -> int:
        """The first sequence id after those of the request."""
        return self.asked.sequence_id + len(self.samples)

    def cached_tokens(self, whole_prompts: bool) -> dict[int, KnownTokens]:
        """Return the tokens that R-workers may have cached, by cache id: prompt and output without the last token.
        The last token is not cached yet, since it is the next step's input. ``whole_prompts``: assume that a prompt is
        cached if its progress is not recorded. Further tokens on R-workers are rejected drafts, or tokens of an
        unrecorded step.
        """
        found: dict[int, KnownTokens] = {}
        for sequence_id, sample in enumerate(self.samples, self.asked.sequence_id):
            reached = sample.reached if whole_prompts or sample.token_ids else sample.reached or 0
            reached = None if sample.ended else reached
            tokens = (self.asked.prompt_token_ids + sample.token_ids)[:-1][:reached]
            if not sample.ended:  # R-workers release a sequence that has ended
                found[sequence_id] = KnownTokens(sequence_id, 0, tokens)
            found |= {each.cache_id: KnownTokens(sequence_id, each.start, tokens) for each in sample.names.values()}
        return found

    def is_of(self, prompt_token_ids: list[int], params: SamplingParams) -> bool:
        """Return whether the recorded request has this prompt and these parameters."""
        try:
            return self.asked.prompt_token_ids == prompt_token_ids and _params_of(self.asked.params) == params
        except (ConfigError, TypeError):  # a FastDecode version with other parameters wrote the journal
            return False

    def replay(self, request: Request) -> list[TokenSequence]:
        """Bring ``request``, newly made with the same prompt and parameters, to its recorded state.

        Return the sequences that have not ended, for the scheduler.
        """
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
        """Return records from which ``pasts_of`` makes this request again."""
        ids = range(self.asked.sequence_id, self.end_id)
        by_id = list(zip(ids, self.samples, strict=True))
        step = Stepped(
            [(each, sample.token_ids) for each, sample in by_id if sample.token_ids],
            [(each, sample.logprobs) for each, sample in by_id if sample.logprobs],
            [(each, *sample.ended) for each, sample in by_id if sample.ended],
        )
        named = [each for sample in self.samples for each in sample.names.values()]
        reached = [Reached(each, sample.reached) for each, sample in by_id if sample.reached is not None]
        placed = Placed(named, reached)
        return [
            self.asked,
            *([step] if step.tokens or step.ended else []),
            *([placed] if named or reached else []),
        ]


def pasts_of(records: Iterable[Record]) -> dict[int, Past]:
    """Return the requests in a journal's records by the id of their first sequence, without dropped requests."""
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
                samples[sequence_id].reached = None
            for sequence_id, logprobs in record.logprobs:
                samples[sequence_id].logprobs += logprobs
            for sequence_id, finish_reason, stop_reason in record.ended:
                samples[sequence_id].ended = finish_reason, stop_reason
        else:
            _place(record, samples)
    return pasts


def _place(record: Record, samples: dict[int, Sample]) -> None:
    """Add the cache ids and cached token counts of ``record`` to ``samples``, except for dropped requests."""
    if isinstance(record, Placed):
        for each in record.named:
            if each.sequence_id in samples:
                samples[each.sequence_id].names[each.cache_id] = each
        for sequence_id, num_tokens in record.reached:
            if sequence_id in samples:
                samples[sequence_id].reached = num_tokens


def asked(request: Request) -> Asked:
    """Return the journal's record of ``request``."""
    params = {each.name: getattr(request.params, each.name) for each in fields(SamplingParams)}
    defaults = SamplingParams()
    given = {name: value for name, value in params.items() if value != getattr(defaults, name)}
    first = request.completions[0].sequence.sequence_id
    return Asked(first, request.request_id, request.prompt, request.prompt_token_ids, given)


def _params_of(given: dict[str, Any]) -> SamplingParams:
    form = given.get("structured_outputs")
    return SamplingParams(**given | ({"structured_outputs": StructuredOutputsParams(**form)} if form else {}))
