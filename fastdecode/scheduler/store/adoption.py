"""What R-workers hold of sequences of an engine before this one: kept as it is until the sequence is asked for again.

Each is a retained prefix under the name that the sequence has on its R-workers, with the tokens after its last full
block. A sequence that comes back goes on in place: the blocks are counted as its own, and its R-workers need not be
told. Until then they may be evicted like other prefixes, and others that begin alike may begin from their full blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as PySequence

from fastdecode.core.held import HeldSequence
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.place import Block, Copy, Segment
from fastdecode.scheduler.store.prefix_index import Hit, PrefixIndex, extend_hashes
from fastdecode.scheduler.store.workers import Prefix, Workers


class Adoption:
    """Prefixes by the id of the sequence that each is the beginning of."""

    def __init__(self, workers: Workers, index: PrefixIndex) -> None:
        self._workers, self._index = workers, index
        self._waiting: set[int] = set()

    def adopt(self, held: Mapping[int, PySequence[HeldSequence]], known: Mapping[int, list[int]]) -> dict[int, int]:
        """R-workers hold these sequences, with their ``known`` tokens, by id: keep those of which something is known,
        each as long as all R-workers have it, and have them forget the rest. Returns the tokens kept on each."""
        lengths: dict[int, int] = {}
        for each in (each for several in held.values() for each in several):
            num_known = len(known.get(each.cache_id, ()))
            lengths[each.cache_id] = min(each.num_tokens, lengths.get(each.cache_id, num_known))
        kept = {cache_id: known[cache_id][:length] for cache_id, length in lengths.items() if length}
        self._waiting |= kept.keys()
        return {index: self._adopt_on(index, several, kept) for index, several in held.items()}

    def hits(self, sequence: Sequence) -> dict[int, Hit]:
        """What R-workers have of ``sequence`` under its own name."""
        if sequence.sequence_id not in self._waiting:
            return {}
        size, found = self._workers.block_size, list(self._prefixes_of(sequence))
        return {each.worker: Hit(len(each.blocks), each, len(each.blocks) * size + len(each.rest)) for each in found}

    def has(self, prefix: Prefix) -> bool:
        """Whether a sequence may go on in ``prefix`` in place."""
        return prefix.prefix_id in self._waiting

    def twin(self, hit: Hit) -> Hit | None:
        """Return the same on another R-worker, if there is one."""
        for worker in self._workers:
            other, rest = worker.prefixes.get(hit.prefix.prefix_id), hit.prefix.rest
            if other and other is not hit.prefix and len(other.blocks) == hit.num_blocks and other.rest == rest:
                return hit._replace(prefix=other)
        return None

    def resume(self, segment: Segment, copy: Copy, hit: Hit) -> None:
        """``copy`` of ``segment`` is what ``hit`` has, where it is."""
        segment.num_tokens = hit.num_tokens
        copy.shared = list(hit.prefix.blocks)
        self._workers[copy.worker].hold(copy.shared)
        self._index.let_go(hit.prefix)

    def close(self, sequence: Sequence) -> None:
        """``sequence`` has begun, or is about to without what is kept of it, which is forgotten."""
        if sequence.sequence_id in self._waiting:
            for prefix in list(self._prefixes_of(sequence)):
                self._index.shorten(prefix, 0)
            self._waiting.discard(sequence.sequence_id)

    def _prefixes_of(self, sequence: Sequence) -> Iterator[Prefix]:
        found = (worker.prefixes.get(sequence.sequence_id) for worker in self._workers)
        return (prefix for prefix in found if prefix)

    def _adopt_on(self, index: int, held: PySequence[HeldSequence], kept: Mapping[int, list[int]]) -> int:
        worker, size = self._workers[index], self._workers.block_size
        for each in held:
            if each.cache_id not in kept:
                worker.release(each.cache_id)
        ours = {each.cache_id: each for each in held if each.cache_id in kept}
        lengths = self._lengths(ours, kept)
        blocks: defaultdict[int, Block] = defaultdict(lambda: Block(num_sequences=0))
        for cache_id, length in lengths.items():
            chain = [blocks[number] for number in ours[cache_id].blocks[: -(-length // size)]]
            hashes: list[bytes] = []
            extend_hashes(hashes, kept[cache_id][:length], size)
            rest = kept[cache_id][len(hashes) * size : length]
            self._index.add(Prefix(cache_id, index, hashes, chain[: len(hashes)], cache_id, chain[len(hashes) :], rest))
            if length < ours[cache_id].num_tokens:
                worker.truncate(cache_id, length)
        worker.free -= len(blocks)
        worker.cached += len(blocks)
        return sum(lengths.values())

    def _lengths(self, ours: Mapping[int, HeldSequence], kept: Mapping[int, list[int]]) -> dict[int, int]:
        """Tokens that are kept of each. A last block that is not full must be no other's, since more is written there:
        one that was cut within a block that others hold keeps its full blocks."""
        size = self._workers.block_size
        last = {cache_id: -(-len(kept[cache_id]) // size) for cache_id in ours}
        holders = Counter(block for cache_id, each in ours.items() for block in each.blocks[: last[cache_id]])
        lengths = {cache_id: len(kept[cache_id]) for cache_id in ours}
        for cache_id, each in ours.items():
            if holders[each.blocks[last[cache_id] - 1]] > 1:
                lengths[cache_id] -= lengths[cache_id] % size
        return lengths
