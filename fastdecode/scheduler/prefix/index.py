"""An index of retained prefixes by token hashes, which also shortens and evicts them."""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.core.parked import hash_after
from fastdecode.core.placing import UNLIMITED
from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Prefix, Workers
from fastdecode.scheduler.prefix.source import Hit, Source
from fastdecode.scheduler.sequence import TokenSequence


class PrefixIndex:
    """Finds retained prefixes by the hash of all tokens up to the end of a block.
    A prefix is within one segment, of at most ``segment_tokens`` tokens. A longer text is found as one prefix per
    segment. ``now_seconds``: the time to record when a prefix is used, on any clock.
    """

    def __init__(self, workers: Workers, segment_tokens: int = UNLIMITED) -> None:
        self.now_seconds = 0.0
        self._workers, self._segment_tokens = workers, segment_tokens
        self._by_hash: dict[bytes, dict[tuple[int, int], Prefix]] = {}

    def longest(self, sequence: TokenSequence, block_hashes: list[bytes], source: Source) -> dict[int, Hit]:
        """Return, by R-worker, the longest cached prefix with these ``block_hashes``, as found by ``source``."""
        found: dict[int, Hit] = {}
        for depth, block_hash in enumerate(block_hashes, 1):
            holders = self._by_hash.get(block_hash)
            if not holders:
                break
            for prefix in holders.values():
                if prefix.worker not in found or found[prefix.worker].num_blocks < depth:
                    found[prefix.worker] = Hit(depth, prefix, depth * self._workers.block_size, source)
        return found

    def num_cached(self, sequence: TokenSequence, block_hashes: list[bytes], source: Source) -> int:
        """Return how many of the blocks ``block_hashes`` are cached on the R-worker that has most of them."""
        return max((hit.num_blocks for hit in self.longest(sequence, block_hashes, source).values()), default=0)

    def cached_from(self, block_hashes: list[bytes], start: int) -> int:
        """Return the index of the first block from ``start`` on that is not cached; the number of blocks if all are."""
        return next(
            (end for end in range(start, len(block_hashes)) if block_hashes[end] not in self._by_hash),
            max(start, len(block_hashes)),
        )

    def holder(self, block_hash: bytes) -> Prefix | None:
        """Return a prefix on any R-worker that has the block ``block_hash``, so also all before it in its segment.
        Return None if there is none.
        """
        return next(iter(self._by_hash.get(block_hash, {}).values()), None)

    def on(self, worker: int, block_hash: bytes) -> Prefix | None:
        """Return a prefix on R-worker ``worker`` that has the block ``block_hash``; None if there is none."""
        return next((each for each in self._by_hash.get(block_hash, {}).values() if each.worker == worker), None)

    def twin(self, hit: Hit) -> Hit | None:
        """Return the other copy of the prefix ``hit``; None if no other R-worker retains one."""
        prefix, holders = hit.prefix, self._by_hash[hit.prefix.block_hashes[hit.num_blocks - 1]].values()
        others = (each for each in holders if each.origin == prefix.origin and each.worker != prefix.worker)
        return next((hit._replace(prefix=each) for each in others), None)

    def pieces(self, sequence: TokenSequence, hit: Hit) -> list[Hit]:
        """Return, for each segment of ``sequence`` that the prefix ``hit`` covers, the prefix within that segment.
        The last one may cover only the first blocks of its segment.
        """
        whole = self._segment_tokens // self._workers.block_size
        ends = range(whole, hit.num_blocks, whole)
        found = [self.holder(sequence.block_hashes[end - 1]) for end in ends]
        last = (hit.num_blocks - whole * len(ends), hit.num_tokens - self._segment_tokens * len(ends))
        closed = (Hit(whole, prefix, self._segment_tokens, hit.source) for prefix in found if prefix)
        return [*closed, hit._replace(num_blocks=last[0], num_tokens=last[1])]

    def take(self, segment: Segment, copy: Copy, hit: Hit) -> None:
        """Let ``copy`` of ``segment`` begin with the tokens of the cached prefix ``hit``.
        If the prefix has the segment's cache id, the copy takes over its blocks; otherwise the copy is forked from it.
        """
        prefix, worker = hit.prefix, self._workers[hit.prefix.worker]
        segment.num_tokens = hit.num_tokens
        copy.shared = prefix.blocks[: hit.num_blocks]
        worker.hold(copy.shared)
        if prefix.prefix_id == segment.cache_id:
            self.let_go(prefix)
            return
        self.touch(prefix)
        worker.fork(segment.cache_id, prefix.prefix_id, segment.num_tokens)

    def is_within_another(self, prefix: Prefix) -> bool:
        """Return whether a longer prefix on the same R-worker has all blocks of ``prefix``."""
        holders = self._by_hash[prefix.block_hashes[-1]].values() if prefix.blocks else ()
        return any(each.worker == prefix.worker and len(each.blocks) > len(prefix.blocks) for each in holders)

    def contained(self, prefix: Prefix) -> Iterable[bytes]:
        """Return the names of parked prefixes that are of no more use once ``prefix`` is parked."""
        return prefix.block_hashes[:-1]

    def touch(self, prefix: Prefix) -> None:
        """Mark ``prefix`` as used now."""
        prefix.used_seconds = self.now_seconds
        self._workers[prefix.worker].prefixes.move_to_end(prefix.prefix_id)

    def add(self, prefix: Prefix) -> None:
        """Retain ``prefix``, whose blocks are already counted as used."""
        for block in (*prefix.blocks, *prefix.own):
            block.num_prefixes += 1
        prefix.used_seconds = self.now_seconds
        self._workers[prefix.worker].prefixes[prefix.prefix_id] = prefix
        for block_hash in self._found_by(prefix, 0):
            self._by_hash.setdefault(block_hash, {})[prefix.worker, prefix.prefix_id] = prefix

    def make_room(self, index: int, num_blocks: int) -> bool:
        """Evict prefixes on R-worker ``index`` until ``num_blocks`` blocks are free.
        Return False if that is impossible.
        """
        worker = self._workers[index]
        if num_blocks > worker.free:
            self.evict(index, num_blocks - worker.free)
        return worker.free >= num_blocks

    def evict(self, index: int, count: int, spared: Prefix | None = None) -> None:
        """Free ``count`` more blocks on R-worker ``index``, or all that only prefixes use.
        The least recently used prefixes are cut first, each from its end.
        """
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
        return prefix.block_hashes[keep:]

    def clear(self, index: int) -> None:
        """Release all prefixes of R-worker ``index``."""
        for prefix in list(self._workers[index].prefixes.values()):
            self.shorten(prefix, 0)

    def shorten(self, prefix: Prefix, keep: int) -> None:
        """Release the blocks of ``prefix`` after the first ``keep`` blocks."""
        worker = self._workers[prefix.worker]
        self.let_go(prefix, keep)
        if keep:
            worker.truncate(prefix.prefix_id, keep * self._workers.block_size)
        else:
            worker.release(prefix.prefix_id)

    def let_go(self, prefix: Prefix, keep: int = 0) -> None:
        """Retain only the first ``keep`` blocks of ``prefix``. No control is queued; callers queue one if needed."""
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


class IndexedSource(Source):
    """A source whose prefixes are in a ``PrefixIndex``, which implements most methods of the source."""

    def __init__(self, workers: Workers, index: PrefixIndex) -> None:
        self._workers, self._index = workers, index

    def pieces(self, sequence: TokenSequence, hit: Hit) -> list[Hit]:
        return self._index.pieces(sequence, hit)

    def twin(self, hit: Hit) -> Hit | None:
        return self._index.twin(hit)

    def take(self, segment: Segment, copy: Copy, hit: Hit) -> None:
        self._index.take(segment, copy, hit)

    def forget(self, worker: int) -> None:
        self._index.clear(worker)


def extend_hashes(block_hashes: list[bytes], token_ids: list[int], block_size: int) -> None:
    """Append the missing hashes of the full blocks of ``token_ids`` to ``block_hashes``.
    Each hash covers all tokens up to the block's end.
    """
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        before = block_hashes[-1] if block_hashes else b""
        block_hashes.append(hash_after(before, token_ids[start : start + block_size]))


def usable_hashes(sequence: TokenSequence, block_size: int) -> list[bytes]:
    """Return the hashes of the blocks that ``sequence`` may reuse. Its last token is always computed."""
    return sequence.block_hashes[: (sequence.num_prefill - 1) // block_size]
