"""Sequences that compute prefixes right now, which others wait for instead of computing them as well."""

from __future__ import annotations

from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.index import PrefixIndex, usable_hashes
from fastdecode.scheduler.prefix.source import Keeper
from fastdecode.scheduler.sequence import Sequence


class Leaders:
    """Finds by block hashes who computes them."""

    def __init__(self, workers: Workers, index: PrefixIndex, kept: Keeper) -> None:
        self._workers, self._index, self._kept = workers, index, kept
        self._computing: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        """Return how many blocks are being computed that others may wait for."""
        return len(self._computing)

    def begin(self, sequence: Sequence, num_blocks: int) -> None:
        """``sequence`` computes its prompt after the first ``num_blocks`` blocks, unless others compute it already."""
        for block_hash in sequence.block_hashes[num_blocks:]:
            self._computing.setdefault(block_hash, sequence)

    def stop(self, sequence: Sequence) -> None:
        """No sequence need wait for ``sequence`` any more: its prompt is cached, or it left."""
        for block_hash in sequence.block_hashes:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """Return a sequence that computes a longer beginning of ``sequence`` than any that is cached."""
        usable = usable_hashes(sequence, self._workers.block_size)
        for depth in range(len(usable), 0, -1):
            leader = self._computing.get(usable[depth - 1])
            if leader and self._kept.is_worth(sequence, depth) and self._kept.will_keep(leader, depth):
                return leader if depth > self._index.num_cached(sequence, usable, self._kept) else None
        return None
