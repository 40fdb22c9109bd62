"""What goes into the sampler and what comes out, for one sequence and one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know of one sequence; the token lists are read during the call and not kept.

    ``stop_token_ids``: tokens that may not be chosen before ``params.min_tokens``, end-of-sequence included unless
    it is ignored. ``bad_words_token_ids``: the token sequences of ``params.bad_words``, each way they can be spelt.
    ``generator_seed``: seeds this row's random draws; ``draw.sample_seed`` derives it from the request's seed.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    generator_seed: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether bias, bans or penalties apply to this row in this step."""
        params = self.params
        held_back = bool(self.stop_token_ids) and len(self.output_token_ids) < params.min_tokens
        return params.changes_logits or held_back or bool(self.bad_words_token_ids)

    @property
    def plain(self) -> bool:
        """Whether the token is simply the likeliest one of the model's own logits."""
        return self.params.greedy and not self.changes_logits


@dataclass(frozen=True)
class SampledToken:
    """The sampler's answer for one row.

    ``logprob`` maps token id to (log-probability, rank from 1) if the request asked, the chosen token first, then the
    likeliest in order. ``failed``: the logits hold NaN or +inf, or no token is left to choose; ``token_id`` is then -1.
    """

    token_id: int
    logprob: dict[int, tuple[float, int]] | None = None
    failed: bool = False
