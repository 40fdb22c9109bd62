"""One sequence as the scheduler knows it: tokens, progress and where its cache lives."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """``max_tokens`` bounds the output; ``num_cached`` tokens of prompt + output are in an R-worker's cache.

    ``siblings`` share the prompt (``SamplingParams.n`` > 1): this sequence computes it, and they are forked from
    it once it is cached.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    siblings: tuple[Sequence, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    worker: int = -1
    num_cached: int = 0
    uses_scratch: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_cached(self) -> int:
        """The most tokens this sequence can ever hold in the cache; its last output token is never cached."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def in_prompt(self) -> bool:
        """True while prompt tokens remain to be computed."""
        return self.num_cached < len(self.prompt_token_ids)

    def tokens(self, start: int, count: int) -> list[int]:
        """``count`` tokens of prompt + output from position ``start``."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : start - num_prompt + count]
        head = self.prompt_token_ids[start : start + count]
        return head + self.output_token_ids[: count - len(head)]
