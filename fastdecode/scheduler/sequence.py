"""One sequence as the scheduler knows it: tokens, progress and where its cache lives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastdecode.scheduler.blocks import Block


@dataclass(eq=False)
class Sequence:
    """``max_tokens`` bounds the output; ``num_cached`` tokens of prompt + output are in an R-worker's cache.

    ``sequence_id`` grows with arrival: a lower one is older. ``siblings`` share the prompt (``SamplingParams.n`` > 1):
    this sequence computes it, and they are forked from it once it is cached. ``num_prefill`` tokens have to be computed
    before it can decode: its prompt, and after a preemption also its output so far.

    It holds ``num_blocks`` blocks, of which the first are ``shared`` with the prefix cache or with siblings. While it
    decodes, :class:`DecodeTable` keeps ``num_cached`` and ``num_blocks``. ``outputs_at_start``: output tokens that it
    had when it last began, None before its first start. ``may_stop``: its output may end before ``max_tokens``.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    siblings: tuple[Sequence, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    worker: int = -1
    num_cached: int = 0
    num_prefill: int = 0
    num_blocks: int = 0
    uses_scratch: bool = False
    shared: list[Block] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    chain_id: int | None = None
    outputs_at_start: int | None = None
    may_stop: bool = False
    was_preempted: bool = False
    _last_token: np.ndarray | None = None

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.output_token_ids.append(token_id)
        if self._last_token is not None:
            self._last_token[0] = token_id

    def keep_last_token(self, place: np.ndarray | None) -> None:
        """From here on the last output token is also written to ``place``, int64 [1]."""
        self._last_token = place
        if place is not None and self.output_token_ids:
            place[0] = self.output_token_ids[-1]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_cached(self) -> int:
        """The most tokens this sequence can ever hold in the cache; its last output token is never cached."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def num_own_blocks(self) -> int:
        """Blocks that nobody else can hold."""
        return self.num_blocks - len(self.shared)

    @property
    def in_prompt(self) -> bool:
        """True while tokens remain to be computed before it can decode."""
        return self.num_cached < self.num_prefill

    def tokens(self, start: int, count: int) -> list[int]:
        """``count`` tokens of prompt + output from position ``start``."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : start - num_prompt + count]
        head = self.prompt_token_ids[start : start + count]
        return head + self.output_token_ids[: count - len(head)]
