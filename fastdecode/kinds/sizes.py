"""Sizes of sequences in caches, in blocks, as the scheduler counts them for all kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Counts blocks with the R-workers' own arithmetic.

    ``block_size``: tokens of a block. ``fixed``: blocks per sequence in addition to those of its tokens.
    ``worth_blocks``: blocks of tokens that take the memory of what is kept per sequence elsewhere.
    """

    block_size: int
    fixed: int = 0
    worth_blocks: int = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks of a sequence of ``num_tokens`` tokens."""
        return self.fixed + -(-num_tokens // self.block_size)

    def blocks_of_tokens(self, num_blocks: Any) -> Any:
        """Return how many of a sequence's ``num_blocks`` hold its tokens; also for an array of sequences."""
        return num_blocks - self.fixed

    def blocks_of_copy(self, num_tokens: int) -> int:
        """Return the blocks that a copy of a sequence cannot share with it: fixed ones, and a partial one."""
        return self.fixed + (num_tokens % self.block_size > 0)

    @property
    def rewinds(self) -> bool:
        """True if a sequence can go back to any token before its last."""
        return self.fixed == 0

    @property
    def worth(self) -> int:
        """Blocks of tokens that take the memory of what a sequence has in addition to its tokens."""
        return self.worth_blocks or self.fixed
