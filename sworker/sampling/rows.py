"""Sampled rows of a step, with the sampler's inputs for their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.sworker.sampling.grammar import Matcher


@dataclass(frozen=True)
class SamplingRow:
    """One sequence's data for the sampler. The token lists are read during the call and not kept.

    ``stop_token_ids``: tokens that may not be chosen before ``params.min_tokens``; they include end-of-sequence unless
    it is ignored. ``bad_words_token_ids``: token sequences of ``params.bad_words``, in every spelling.
    ``generator_seed``: seeds this row's random draws; ``sample_seed`` derives it from the request's seed. ``grammar``:
    tells which tokens may come next; the code that takes the token advances it.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    generator_seed: int = 0
    grammar: Matcher | None = None

    def after(self, draft_token_ids: Sequence[int], grammar: Matcher | None = None) -> SamplingRow:
        """Return the row for the token after ``draft_token_ids``. ``grammar``: the grammar's state after them."""
        if self.plain:
            return self
        return replace(self, output_token_ids=[*self.output_token_ids, *draft_token_ids], grammar=grammar)

    @property
    def changes_logits(self) -> bool:
        """True if bias, bans or penalties apply to this row in this step."""
        params = self.params
        held_back = bool(self.stop_token_ids) and len(self.output_token_ids) < params.min_tokens
        edited = params.changes_logits or held_back or bool(self.bad_words_token_ids)
        return edited or self.grammar is not None

    @property
    def plain(self) -> bool:
        """True if the next token is the likeliest by the model's unchanged logits."""
        return self.params.greedy and not self.changes_logits
