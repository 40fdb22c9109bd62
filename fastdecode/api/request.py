"""A waiting or running request: its sequences, and the completion that each sequence produces."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastdecode.api.outputs import CompletionOutput, Grown, Logprob, RequestMetrics, RequestOutput
from fastdecode.api.sampling_params import NO_TOKEN, SamplingParams
from fastdecode.api.structured_outputs import UNFOLLOWED
from fastdecode.api.text import TextStream, Tokenizer
from fastdecode.core.weighing import AttentionSource
from fastdecode.scheduler import TokenSequence
from fastdecode.sworker import SModel
from fastdecode.sworker.sampling import SampledToken, SamplingRow, sample_seed
from fastdecode.sworker.sampling.grammar import Matcher
from fastdecode.sworker.sampling.prompt_scores import PromptScores


@dataclass
class Completion:
    """One of a request's ``n`` outputs: a sequence, its text, and how it ended."""

    index: int
    sequence: TokenSequence
    text: TextStream | None
    generator_seed: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    grammar: Matcher | None = None
    grammar_ahead: list[Matcher] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)
    sources: list[tuple[AttentionSource, ...] | None] = field(default_factory=list)

    def fitting(self, draft_token_ids: list[int]) -> list[int]:
        """Return the longest prefix of ``draft_token_ids`` that the grammar allows; without a grammar, all of them."""
        if self.grammar is None:
            return draft_token_ids
        self.grammar_ahead = self.grammar.after(draft_token_ids)
        return draft_token_ids[: len(self.grammar_ahead)]

    def append(self, sampled: SampledToken, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        """Append the token ``sampled``, and end the completion if this token is its last."""
        if sampled.failed:
            reason = _exclusion(params, len(self.sequence.output_token_ids)) if sampled.excluded else ""
            self.finish_reason, self.stop_reason = "error", reason or "the model gave no finite logits"
            return
        token = sampled.token_id
        tokens = self.sequence.output_token_ids
        self.sequence.append(token)
        if sampled.logprob is not None:
            text = self.text.decode_one if self.text else lambda token: None
            self.logprobs.append({t: Logprob(*found, text(t)) for t, found in sampled.logprob.items()})
        if params.attention_sources:
            self.sources.append(sampled.sources)
        ends = token in eos_token_ids and not params.ignore_eos
        stopped = token in (params.stop_token_ids or ())
        hidden = (ends or stopped) and not params.include_stop_str_in_output
        string = self.text.push(token, len(tokens) >= params.min_tokens) if self.text and not hidden else None
        if self.text:
            self.text_ends.append(self.text.num_visible())
        if ends:
            dead_end = self.grammar.dead_end if self.grammar is not None else ""
            self.finish_reason = "error" if dead_end else "stop"
            self.stop_reason = f"{UNFOLLOWED}: {dead_end}" if dead_end else None
        elif stopped or string is not None:
            self.finish_reason, self.stop_reason = "stop", token if stopped else string
        elif self.grammar is not None:
            self._follow(self.grammar, token)
        if self.finish_reason is None and len(tokens) >= self.sequence.max_tokens:
            self.finish_reason = "length"

    def _follow(self, grammar: Matcher, token: int) -> None:
        """Advance the grammar by ``token``; end the completion if the text is complete."""
        grammar.advance(token)
        if grammar.finished:
            self.finish_reason = "stop"
        elif grammar.error:
            self.finish_reason, self.stop_reason = "error", f"{UNFOLLOWED}: {grammar.error}"

    def output(self) -> CompletionOutput:
        """Return a snapshot of this completion for the user."""
        return CompletionOutput(
            self.index,
            self.text.visible(self.finish_reason is not None) if self.text else "",
            Grown(self.sequence.output_token_ids),
            self.finish_reason,
            self.stop_reason,
            Grown(self.logprobs) if self.logprobs else None,
            Grown(self.text_ends) if self.text_ends else (),
            Grown(self.sources) if self.sources else None,
        )


class Request:
    """A request: its prompt, its parameters, and ``params.n`` completions."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        completions: list[Completion],
        bad_words_token_ids: tuple[tuple[int, ...], ...],
        eos_token_ids: frozenset[int],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.completions = completions
        self.eos_token_ids = eos_token_ids
        self.arrival_seconds = time.perf_counter()
        self.started_seconds: float | None = None
        self.token_seconds: list[float] = []
        asks = params.prompt_logprobs is not None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] * len(prompt_token_ids) if asks else None
        self.num_growing = len(completions)
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._sampling_rows = [
            SamplingRow(
                params,
                prompt_token_ids,
                each.sequence.output_token_ids,
                stops,
                bad_words_token_ids,
                each.generator_seed,
                each.grammar,
            )
            for each in completions
        ]

    @property
    def finished(self) -> bool:
        """True if every completion has ended."""
        return not self.num_growing

    @property
    def num_prompt_top(self) -> int:
        """The number of likeliest tokens to report at each prompt position; -1 means all."""
        return self.params.prompt_logprobs or 0

    def take_prompt_scores(self, scores: PromptScores) -> None:
        """Store one step's log-probabilities of prompt tokens, replacing earlier values at the same positions."""
        stream = self.completions[0].text
        text = stream.decode_one if stream else lambda token: None
        if self.prompt_logprobs is not None:
            for position, found in enumerate(scores.logprobs, scores.start):
                self.prompt_logprobs[position] = {token: Logprob(*each, text(token)) for token, each in found.items()}

    def sampling_row(self, completion: Completion) -> SamplingRow:
        """Return the sampler's input for the completion's next token.

        The row is made once and reused, since its list of tokens grows in place.
        """
        return self._sampling_rows[completion.index]

    def draft_rows(self, completion: Completion, draft_token_ids: list[int]) -> list[SamplingRow]:
        """Return one sampler input per draft token: row i samples the token after the first i + 1 draft tokens."""
        row, ahead = self.sampling_row(completion), completion.grammar_ahead
        ends = range(1, len(draft_token_ids) + 1)
        return [row.after(draft_token_ids[:end], ahead[end - 1] if ahead else None) for end in ends]

    def output(self) -> RequestOutput:
        """Return a snapshot of the request and its completions for the user."""
        metrics = RequestMetrics(self.arrival_seconds, Grown(self.token_seconds), self.started_seconds)
        outputs = [completion.output() for completion in self.completions]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished, metrics,
            self.completions[0].sequence.num_hit_tokens, self.prompt_logprobs,
        )  # fmt: skip


def make_request(
    model: SModel,
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    params: SamplingParams,
    first_sequence_id: int,
    engine_seed: int,
) -> Request:
    """Return a request with ``params.n`` completions, whose sequences are numbered from ``first_sequence_id``.

    The first sequence computes the prompt; the others are forks of it. Without a seed in ``params``, the seed is
    derived from ``engine_seed`` and the sequence's number.
    """
    room = model.max_model_len - len(prompt_token_ids)
    max_tokens = min(params.max_tokens or room, room)
    form = params.structured_outputs
    grammars = [None if form is None else model.grammars.matcher(form) for _ in range(params.n)]
    sequences = [TokenSequence(first_sequence_id + index, prompt_token_ids, max_tokens) for index in range(params.n)]
    sequences[0].siblings = tuple(sequences[1:])
    sequences[0].scored = params.prompt_logprobs is not None
    for sequence in sequences:
        sequence.may_stop = not params.ignore_eos or bool(params.stop or params.stop_token_ids or form)
    seed = params.seed if params.seed is not None else (engine_seed << 32) + first_sequence_id
    completions = [
        Completion(
            index,
            sequence,
            _text_stream(model.tokenizer, params, prompt_token_ids),
            sample_seed(seed, index),
            grammar=grammars[index],
        )
        for index, sequence in enumerate(sequences)
    ]
    bad_words = model.bad_words_token_ids(params.bad_words or ())
    return Request(request_id, prompt, prompt_token_ids, params, completions, bad_words, model.eos_token_ids)


def _exclusion(params: SamplingParams, num_tokens: int) -> str:
    """Name the fields of ``params`` that together forbid every next token; "" if some token is allowed."""
    limits = {
        "structured_outputs": params.structured_outputs is not None,
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "min_tokens": num_tokens < params.min_tokens,
    }
    named = [name for name, holds in limits.items() if holds]
    return f"{NO_TOKEN}: {' and '.join(named)} exclude {'each other' if named[1:] else 'all'}" if named else ""


def _text_stream(tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: list[int]) -> TextStream | None:
    """Return a new text stream for a completion; None without a tokenizer or with ``detokenize=False``."""
    if tokenizer is None or not params.detokenize:
        return None
    shown, skips = params.shown_special_token_ids, params.skip_special_tokens
    hidden = tokenizer.special_token_ids.difference(shown) if shown and skips else frozenset()
    return TextStream(
        tokenizer.backend,
        tuple(params.stop or ()),
        skips and not shown,
        params.include_stop_str_in_output,
        prompt_token_ids,
        hidden,
    )


class InFlight:
    """All waiting and running requests, by id and by sequence id. ``asking``: sequences that need attention sources."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._growing: dict[int, tuple[Request, Completion]] = {}
        self.asking: set[int] = set()

    def __len__(self) -> int:
        """Return the number of requests that wait or run."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        """Return whether ``request_id`` waits or runs."""
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Add ``request`` and its sequences."""
        self._requests[request.request_id] = request
        for completion in request.completions:
            self._growing[completion.sequence.sequence_id] = (request, completion)
            if request.params.attention_sources:
                self.asking.add(completion.sequence.sequence_id)

    def remove(self, request_id: str) -> Request | None:
        """Remove and return the request with this id; None if no such request waits or runs."""
        return self._requests.pop(request_id, None)

    def end(self, completion: Completion) -> None:
        """Stop tracking the sequence of ``completion``."""
        request, _ = self._growing.pop(completion.sequence.sequence_id)
        self.asking.discard(completion.sequence.sequence_id)
        request.num_growing -= 1

    def completion(self, sequence_id: int) -> Completion:
        """Return the completion that the sequence with this id produces."""
        return self._growing[sequence_id][1]

    def family(self, sequence_id: int) -> tuple[Request, list[Completion]]:
        """Return the sequence's request, and the completions that sample a next token from the sequence's logits.

        Before the sequence forks, these are all completions that share its prompt; later, only the sequence's own.
        """
        request, completion = self._growing[sequence_id]
        siblings = completion.sequence.siblings
        others = [self._growing[each.sequence_id][1] for each in siblings] if siblings else ()
        return request, [completion, *others]

    def sampling_rows(self, sequence_id: int, draft_token_ids: list[int] | None = None) -> list[SamplingRow]:
        """Return the sampler's inputs for the sequence's next token, one per completion in its ``family``.

        A sequence with draft tokens has one completion, and one additional input per draft token.
        """
        request, completion = self._growing[sequence_id]
        if not completion.sequence.siblings and not draft_token_ids:
            return [request.sampling_row(completion)]
        request, completions = self.family(sequence_id)
        rows = [request.sampling_row(each) for each in completions]
        return [*rows, *request.draft_rows(completions[0], draft_token_ids)] if draft_token_ids else rows
