"""KV blocks per R-worker, counted as the R-workers count them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False, slots=True)
class Block:
    """A full block with more than one possible holder: running sequences, and chains of the prefix cache."""

    num_sequences: int = 1
    num_chains: int = 0


class BlockLedger:
    """Free blocks per R-worker.

    A sequence of t tokens holds ceil(t / block_size) blocks. Most are its own, and only counted; those that others may
    hold as well are :class:`Block` objects, counted once however many hold them. ``cached`` blocks are held by chains
    only: they are free for the asking.
    """

    def __init__(self, num_blocks: Iterable[int], block_size: int) -> None:
        self.num_blocks = list(num_blocks)
        self.block_size = block_size
        self.free = list(self.num_blocks)
        self.cached = [0] * len(self.num_blocks)

    @property
    def num_workers(self) -> int:
        """R-workers that are or were here."""
        return len(self.num_blocks)

    def join(self, num_blocks: int) -> None:
        """One more R-worker, with all its blocks free."""
        self.num_blocks.append(num_blocks)
        self.free.append(num_blocks)
        self.cached.append(0)

    def lose(self, worker: int) -> None:
        """``worker`` is gone; whoever held its blocks holds them no more."""
        self.num_blocks[worker] = self.free[worker] = self.cached[worker] = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def available(self, worker: int) -> int:
        """Blocks that are free or would be, were the prefix cache emptied."""
        return self.free[worker] + self.cached[worker]

    def available_each(self) -> np.ndarray:
        """The same for every R-worker: int64 [num_workers]."""
        return np.add(self.free, self.cached)

    def take(self, worker: int, count: int) -> None:
        """Free blocks become somebody's own."""
        self.free[worker] -= count

    def give_back(self, worker: int, count: int) -> None:
        """Somebody's own blocks become free."""
        self.free[worker] += count

    def hold(self, worker: int, blocks: Iterable[Block]) -> None:
        """One more sequence holds ``blocks``."""
        for block in blocks:
            self.cached[worker] -= block.num_sequences == 0
            block.num_sequences += 1

    def drop(self, worker: int, blocks: Iterable[Block]) -> None:
        """One sequence less holds ``blocks``."""
        for block in blocks:
            block.num_sequences -= 1
            if block.num_sequences == 0:
                self.cached[worker] += block.num_chains > 0
                self.free[worker] += block.num_chains == 0

    def retain(self, blocks: Iterable[Block]) -> None:
        """One more chain holds ``blocks``, which a sequence holds too."""
        for block in blocks:
            block.num_chains += 1

    def forget(self, worker: int, blocks: Iterable[Block]) -> None:
        """One chain less holds ``blocks``."""
        for block in blocks:
            block.num_chains -= 1
            if block.num_chains == 0 and block.num_sequences == 0:
                self.cached[worker] -= 1
                self.free[worker] += 1
