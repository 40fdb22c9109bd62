"""What sequences of a model take in caches, in blocks, as the scheduler counts them, whatever their layers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Counts with the R-workers' own arithmetic.

    ``block_size``: tokens of a block. ``fixed``: blocks that a sequence takes beside those of its tokens, for what its
    layers keep per sequence. ``worth_blocks``: blocks of tokens whose memory that takes where it lies elsewhere.
    """

    block_size: int
    fixed: int = 0
    worth_blocks: int = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that a sequence of so many tokens takes."""
        return self.fixed + -(-num_tokens // self.block_size)

    def blocks_of_tokens(self, num_blocks: Any) -> Any:
        """Return those of ``num_blocks`` of a sequence, or of several as an array, that its tokens take."""
        return num_blocks - self.fixed

    def blocks_of_copy(self, num_tokens: int) -> int:
        """Return the blocks that a copy of a sequence cannot share with it: its own, and one that is not full."""
        return self.fixed + (num_tokens % self.block_size > 0)

    @property
    def rewinds(self) -> bool:
        """True if a sequence can go back to any token before its last."""
        return self.fixed == 0

    @property
    def worth(self) -> int:
        """Blocks of tokens whose memory a sequence takes beside that of its tokens."""
        return self.worth_blocks or self.fixed
