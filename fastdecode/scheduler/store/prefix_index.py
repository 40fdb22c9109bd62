"""Retained prefixes, by the hashes of their tokens, and how they are found, shortened and evicted."""

from __future__ import annotations

import hashlib
from array import array
from typing import NamedTuple

from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.workers import Prefix, Workers


class Hit(NamedTuple):
    """A cached beginning: the number of its full blocks, the prefix that has the last of them, and its tokens."""

    num_blocks: int
    prefix: Prefix
    num_tokens: int


class PrefixIndex:
    """Retained prefixes, found by the hash of all tokens up to a block's end. ``now_seconds``: of any clock, as it was
    told last.

    A prefix holds blocks of one segment, so what several segments hold is found as a prefix of each.
    """

    def __init__(self, workers: Workers) -> None:
        self.now_seconds = 0.0
        self._workers = workers
        self._by_hash: dict[bytes, dict[tuple[int, int], Prefix]] = {}

    def longest(self, sequence: Sequence, block_hashes: list[bytes]) -> dict[int, Hit]:
        """For each R-worker that holds a beginning of ``sequence`` within blocks of these hashes the longest."""
        found: dict[int, Hit] = {}
        for depth, block_hash in enumerate(block_hashes, 1):
            holders = self._by_hash.get(block_hash)
            if not holders:
                break
            for prefix in holders.values():
                if prefix.worker not in found or found[prefix.worker].num_blocks < depth:
                    found[prefix.worker] = Hit(depth, prefix, depth * self._workers.block_size)
        return found

    def holder(self, block_hash: bytes) -> Prefix | None:
        """A prefix that has the block, and with it all blocks of its segment before that one."""
        return next(iter(self._by_hash.get(block_hash, {}).values()), None)

    def on(self, worker: int, block_hash: bytes) -> Prefix | None:
        """A prefix of ``worker`` that has the block."""
        return next((each for each in self._by_hash.get(block_hash, {}).values() if each.worker == worker), None)

    def twin(self, prefix: Prefix, num_blocks: int) -> Prefix | None:
        """The other copy of what ``prefix`` retains, if it still has the first ``num_blocks`` blocks."""
        holders = self._by_hash[prefix.block_hashes[num_blocks - 1]].values()
        return next((each for each in holders if each.origin == prefix.origin and each.worker != prefix.worker), None)

    def is_within_another(self, prefix: Prefix) -> bool:
        """Whether a longer prefix of the same R-worker has all blocks of ``prefix``."""
        holders = self._by_hash[prefix.block_hashes[-1]].values() if prefix.blocks else ()
        return any(each.worker == prefix.worker and len(each.blocks) > len(prefix.blocks) for each in holders)

    def touch(self, prefix: Prefix) -> None:
        """``prefix`` was used just now."""
        prefix.used_seconds = self.now_seconds
        self._workers[prefix.worker].prefixes.move_to_end(prefix.prefix_id)

    def add(self, prefix: Prefix) -> None:
        """Retain ``prefix``, whose blocks a running sequence holds."""
        for block in (*prefix.blocks, *prefix.own):
            block.num_prefixes += 1
        prefix.used_seconds = self.now_seconds
        self._workers[prefix.worker].prefixes[prefix.prefix_id] = prefix
        for block_hash in self._found_by(prefix, 0):
            self._by_hash.setdefault(block_hash, {})[prefix.worker, prefix.prefix_id] = prefix

    def evict(self, index: int, count: int, spared: Prefix | None = None) -> None:
        """Free at least ``count`` more blocks if the cache holds so many, from the ends of the oldest prefixes."""
        worker = self._workers[index]
        target = worker.free + min(count, worker.cached)
        for prefix in list(worker.prefixes.values()):
            keep, freed = len(prefix.blocks), len(prefix.own)
            while keep and worker.free + freed < target and not prefix.blocks[keep - 1].num_sequences:
                keep -= 1
                freed += prefix.blocks[keep].num_prefixes == 1
            if keep < len(prefix.blocks) or prefix.own:
                self.shorten(prefix, keep)
            if worker.free >= target:
                return

    def _found_by(self, prefix: Prefix, keep: int) -> list[bytes]:
        """Hashes of all its blocks but the first ``keep``, by which it is found."""
        return prefix.block_hashes[keep:]

    def clear(self, index: int) -> None:
        """Forget all prefixes of an R-worker."""
        for prefix in list(self._workers[index].prefixes.values()):
            self.shorten(prefix, 0)

    def shorten(self, prefix: Prefix, keep: int) -> None:
        """Keep only the first ``keep`` blocks of a prefix."""
        worker = self._workers[prefix.worker]
        self.let_go(prefix, keep)
        if keep:
            worker.truncate(prefix.prefix_id, keep * self._workers.block_size)
        else:
            worker.release(prefix.prefix_id)

    def let_go(self, prefix: Prefix, keep: int = 0) -> None:
        """Count only the first ``keep`` blocks of a prefix as retained; its R-worker is told by another, or has the
        rest as a running sequence."""
        worker = self._workers[prefix.worker]
        worker.forget(reversed(prefix.blocks[keep:]))
        worker.forget(prefix.own)
        for block_hash in self._found_by(prefix, keep):
            holders = self._by_hash[block_hash]
            del holders[prefix.worker, prefix.prefix_id]
            if not holders:
                del self._by_hash[block_hash]
        del prefix.blocks[keep:], prefix.block_hashes[keep:]
        prefix.own, prefix.rest = [], []
        if not keep:
            del worker.prefixes[prefix.prefix_id]


def extend_hashes(block_hashes: list[bytes], token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``block_hashes`` lacks; each covers all before it."""
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        before = block_hashes[-1] if block_hashes else b""
        block = array("q", token_ids[start : start + block_size]).tobytes()
        block_hashes.append(hashlib.blake2b(before + block, digest_size=16).digest())
