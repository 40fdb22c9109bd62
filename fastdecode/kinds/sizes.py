"""Counts the cache blocks that sequences take, for the scheduler and all kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Counts the cache blocks of sequences by the same rules as the R-workers.

    ``block_size``: tokens of a block. ``fixed``: blocks per sequence in addition to those of its tokens.
    ``worth_blocks``: blocks of tokens that would take as much memory as one sequence's states in the S-worker.
    """

    block_size: int
    fixed: int = 0
    worth_blocks: int = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence of ``num_tokens`` tokens takes, fixed ones included."""
        return self.fixed + -(-num_tokens // self.block_size)

    def blocks_of_tokens(self, num_blocks: Any) -> Any:
        """Return how many of a sequence's ``num_blocks`` blocks hold tokens: a number, or an array of numbers."""
        return num_blocks - self.fixed

    def blocks_of_copy(self, num_tokens: int) -> int:
        """Return how many blocks a copy of a sequence needs of its own: fixed ones, and a partly filled one."""
        return self.fixed + (num_tokens % self.block_size > 0)

    @property
    def rewinds(self) -> bool:
        """True if a sequence can be truncated after any of its tokens."""
        return self.fixed == 0

    @property
    def worth(self) -> int:
        """Blocks of tokens that would take as much memory as a sequence's fixed blocks and states together."""
        return self.worth_blocks or self.fixed
