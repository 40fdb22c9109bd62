"""Retained prefixes on the disks of R-workers, as both sides speak of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastdecode.core.types import SPLIT_TOKENS

PIECE_TOKENS = SPLIT_TOKENS
"""Tokens that are written, checked and read back at a time: a multiple of every block size."""

MARK_BYTES = 16
"""Of the hash of all tokens up to a block's end, by which a beginning is found."""


def num_marks(num_blocks: int, block_size: int) -> int:
    """Pieces of a chain of ``num_blocks`` blocks, and so its marks."""
    return -(-num_blocks * block_size // PIECE_TOKENS)


class Chain(NamedTuple):
    """A parked chain of blocks. ``marks``: of the end of each piece, the last one of the chain's end."""

    num_blocks: int
    marks: tuple[bytes, ...]

    @staticmethod
    def of(block_hashes: Sequence[bytes], block_size: int) -> Chain:
        """The chain of all blocks of these hashes."""
        step = PIECE_TOKENS // block_size
        whole = block_hashes[step - 1 :: step]
        return Chain(len(block_hashes), (*whole, *(block_hashes[-1:] if len(block_hashes) % step else ())))

    @property
    def name(self) -> bytes:
        """The hash of all its tokens."""
        return self.marks[-1]
