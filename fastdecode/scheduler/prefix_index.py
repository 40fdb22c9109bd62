"""What is kept for its prefix: chains of full blocks, found by the hash of all tokens up to a block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.scheduler.blocks import Block, BlockLedger
from fastdecode.types import Verb

Control = tuple[int, int, int, int]


@dataclass(eq=False)
class Chain:
    """A retained sequence, named ``chain_id`` on R-worker ``worker``; hash i covers all tokens up to block i's end."""

    chain_id: int
    worker: int
    block_hashes: list[bytes]
    blocks: list[Block]


class PrefixIndex:
    """Chained block hashes → retained sequences, least recently used first."""

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self._chains: list[OrderedDict[int, Chain]] = [OrderedDict() for _ in ledger.num_blocks]
        self._by_hash: dict[bytes, dict[int, Chain]] = {}

    def __len__(self) -> int:
        """Retained sequences."""
        return sum(map(len, self._chains))

    def longest(self, block_hashes: list[bytes]) -> dict[int, tuple[int, Chain]]:
        """For each R-worker that holds a beginning of it: how many blocks, and a chain that has them."""
        found: dict[int, tuple[int, Chain]] = {}
        for depth, block_hash in enumerate(block_hashes, 1):
            holders = self._by_hash.get(block_hash)
            if not holders:
                break
            for chain in holders.values():
                if found.get(chain.worker, (0,))[0] < depth:
                    found[chain.worker] = (depth, chain)
        return found

    def touch(self, chain: Chain) -> None:
        """``chain`` was used just now."""
        self._chains[chain.worker].move_to_end(chain.chain_id)

    def add(self, chain: Chain) -> None:
        """Retain ``chain``, whose blocks a running sequence holds."""
        self._ledger.retain(chain.blocks)
        self._chains[chain.worker][chain.chain_id] = chain
        for block_hash in chain.block_hashes:
            self._by_hash.setdefault(block_hash, {})[chain.chain_id] = chain

    def remove(self, worker: int, chain_id: int) -> Control | None:
        """Forget a chain; returns the control that releases it, None if it is gone already."""
        chain = self._chains[worker].get(chain_id)
        return self._shorten(chain, 0) if chain else None

    def evict(self, worker: int, count: int) -> Iterator[Control]:
        """Free at least ``count`` more blocks if the cache holds so many, from the ends of the oldest chains."""
        target = self._ledger.free[worker] + min(count, self._ledger.cached[worker])
        for chain in list(self._chains[worker].values()):
            keep = len(chain.blocks)
            freed = 0
            while keep and self._ledger.free[worker] + freed < target and not chain.blocks[keep - 1].num_sequences:
                keep -= 1
                freed += chain.blocks[keep].num_chains == 1
            if keep < len(chain.blocks):
                yield self._shorten(chain, keep)
            if self._ledger.free[worker] >= target:
                return

    def clear(self) -> Iterator[tuple[int, Control]]:
        """Forget everything; yields R-workers with the controls that release it."""
        for worker, chains in enumerate(self._chains):
            for chain in list(chains.values()):
                yield worker, self._shorten(chain, 0)

    def join(self) -> None:
        """One more R-worker, which holds no chain."""
        self._chains.append(OrderedDict())

    def lose(self, worker: int) -> None:
        """``worker`` is gone with its chains."""
        for chain in list(self._chains[worker].values()):
            self._shorten(chain, 0)

    def _shorten(self, chain: Chain, keep: int) -> Control:
        """Keep only the first ``keep`` blocks of a chain."""
        self._ledger.forget(chain.worker, reversed(chain.blocks[keep:]))
        for block_hash in chain.block_hashes[keep:]:
            holders = self._by_hash[block_hash]
            del holders[chain.chain_id]
            if not holders:
                del self._by_hash[block_hash]
        del chain.blocks[keep:], chain.block_hashes[keep:]
        if keep:
            return (int(Verb.TRUNCATE), chain.chain_id, 0, keep * self._ledger.block_size)
        del self._chains[chain.worker][chain.chain_id]
        return (int(Verb.RELEASE), chain.chain_id, 0, 0)


def extend_hashes(block_hashes: list[bytes], token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``block_hashes`` lacks; each covers all before it."""
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        before = block_hashes[-1] if block_hashes else b""
        block = array("q", token_ids[start : start + block_size]).tobytes()
        block_hashes.append(hashlib.blake2b(before + block, digest_size=16).digest())
