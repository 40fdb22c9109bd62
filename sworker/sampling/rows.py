"""Rows of a step that are sampled, with all that the sampler must know of their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.sworker.sampling.grammar import Matcher


@dataclass(frozen=True)
class SamplingRow:
    """One sequence as the sampler must know it; the token lists are read during the call and not kept.

    ``stop_token_ids``: tokens that may not be chosen before ``params.min_tokens``, end-of-sequence included unless
    it is ignored. ``bad_words_token_ids``: the token sequences of ``params.bad_words``, each way they can be spelt.
    ``generator_seed``: seeds this row's random draws; ``sample_seed`` derives it from the request's seed.
    ``grammar``: which tokens may come next; it is asked, and moved on by the one who takes the token.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    generator_seed: int = 0
    grammar: Matcher | None = None

    def after(self, draft_token_ids: Sequence[int], grammar: Matcher | None = None) -> SamplingRow:
        """The row of the token that would follow if ``draft_token_ids`` came next; ``grammar`` as it would stand."""
        if self.plain:
            return self
        return replace(self, output_token_ids=[*self.output_token_ids, *draft_token_ids], grammar=grammar)

    @property
    def changes_logits(self) -> bool:
        """Say whether bias, bans or penalties apply to this row in this step."""
        params = self.params
        held_back = bool(self.stop_token_ids) and len(self.output_token_ids) < params.min_tokens
        edited = params.changes_logits or held_back or bool(self.bad_words_token_ids)
        return edited or self.grammar is not None

    @property
    def plain(self) -> bool:
        """Say whether the token is simply the likeliest one of the model's own logits."""
        return self.params.greedy and not self.changes_logits
