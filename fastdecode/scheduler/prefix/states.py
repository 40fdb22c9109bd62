"""The source of prefixes with recurrent states.
A state covers all tokens before it, so other sequences can start only where a state was kept. A prompt stops at some
block boundaries, its checkpoints, to copy its state. These are: the last boundary before its last token, the point
where it differs from a similar prompt seen before, and every 2^k blocks. The number k is such that states take at most
a quarter of the memory of the tokens between them. A sequence that ends or is preempted leaves its cache without a
copy: full blocks, the tokens after them, and the state after all tokens. A kept state counts as the blocks that it
takes, and is evicted before the states of shorter prefixes within it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from fastdecode.core.placing import UNLIMITED
from fastdecode.scheduler.names import CacheIds, Names
from fastdecode.scheduler.places.place import Block, Copy, Segment
from fastdecode.scheduler.places.workers import Prefix, Workers
from fastdecode.scheduler.prefix.index import IndexedSource, PrefixIndex, extend_hashes, usable_hashes
from fastdecode.scheduler.prefix.source import Hit, Keeper, Source
from fastdecode.scheduler.sequence import TokenSequence


class StateIndex(PrefixIndex):
    """An index of prefixes with recurrent states. A prefix is found only by its last block."""

    def __init__(self, workers: Workers, segment_tokens: int = UNLIMITED) -> None:
        super().__init__(workers, segment_tokens)
        self._after: dict[tuple[int, bytes], Counter[bytes]] = {}

    def longest(self, sequence: TokenSequence, block_hashes: list[bytes], source: Source) -> dict[int, Hit]:
        """Return, by R-worker, the longest prefix with a state that ends before the last token of ``sequence``."""
        found: dict[int, Hit] = {}
        for depth, block_hash in enumerate(block_hashes, 1):
            for prefix in self._by_hash.get(block_hash, {}).values():
                start, count = depth * self._workers.block_size, len(prefix.rest)
                here = found.get(prefix.worker)
                if here is not None and here.num_tokens >= start + count:
                    continue
                if start + count < sequence.num_prefill and sequence.tokens(start, count) == prefix.rest:
                    found[prefix.worker] = Hit(depth, prefix, start + count, source)
        return found

    def resting(self, worker: int, tokens: list[int], block_hashes: list[bytes]) -> list[bytes]:
        """Return the names of retained prefixes of ``tokens`` on R-worker ``worker`` that end inside a block."""
        size, names = self._workers.block_size, list[bytes]()
        for depth, block_hash in enumerate(block_hashes, 1):
            for each in self._by_hash.get(block_hash, {}).values():
                start, count = depth * size, len(each.rest)
                if each.worker == worker and count and start + count < len(tokens):
                    names += [each.name] if tokens[start : start + count] == each.rest else []
        return names

    def is_within_another(self, prefix: Prefix) -> bool:
        """Return whether longer prefixes on its R-worker begin with ``prefix`` and all continue with the same tokens.
        If they continue differently, other sequences may need the state of ``prefix``.
        """
        return bool(prefix.blocks) and len(self._after.get((prefix.worker, prefix.name), ())) == 1

    def contained(self, prefix: Prefix) -> Iterable[bytes]:
        shorter = (*prefix.block_hashes, *prefix.contains)
        after = (self._after.get((prefix.worker, name), ()) for name in shorter)
        return [name for name, counts in zip(shorter, after, strict=True) if len(counts) == 1 and name != prefix.name]

    def add(self, prefix: Prefix) -> None:
        super().add(prefix)
        for name, following in self._steps(prefix):
            self._after.setdefault((prefix.worker, name), Counter())[following] += 1

    def let_go(self, prefix: Prefix, keep: int = 0) -> None:
        steps = self._steps(prefix)
        super().let_go(prefix, keep)
        for name, following in steps:
            counts = self._after[prefix.worker, name]
            counts[following] -= 1
            if not counts[following]:
                del counts[following]
            if not counts:
                del self._after[prefix.worker, name]

    def _steps(self, prefix: Prefix) -> list[tuple[bytes, bytes]]:
        """Return (hash of a shorter prefix of ``prefix``, hash of the next longer one) for each shorter prefix."""
        ends = [*prefix.block_hashes, *([prefix.name] if prefix.rest else [])]
        return [*pairwise(ends), *((name, prefix.name) for name in prefix.contains)]

    def ending(self, worker: int, block_hash: bytes, rest: list[int]) -> Prefix | None:
        """Return a prefix on R-worker ``worker`` that ends with block ``block_hash`` and tokens ``rest``.
        Return None if there is none.
        """
        holders = self._by_hash.get(block_hash, {}).values()
        return next((each for each in holders if each.worker == worker and each.rest == rest), None)

    def touch(self, prefix: Prefix) -> None:
        """Mark ``prefix`` and the shorter prefixes within it as used now; the shortest will be evicted last."""
        super().touch(prefix)
        for block_hash in reversed(prefix.block_hashes):
            for each in self._by_hash.get(block_hash, {}).values():
                if each.worker == prefix.worker and not each.rest:
                    super().touch(each)

    def take(self, segment: Segment, copy: Copy, hit: Hit) -> None:
        """Let ``copy`` of ``segment`` begin with the whole prefix of ``hit``; its state is copied first."""
        prefix, blocks = hit.prefix, list(hit.prefix.blocks)
        worker = self._workers[prefix.worker]
        worker.hold(blocks)
        missing = segment.num_blocks - hit.num_blocks - worker.free
        # a sequence that takes over the prefix needs no copy of its state
        missing -= len(prefix.own) if prefix.prefix_id == segment.cache_id else 0
        if missing > 0:
            self.evict(prefix.worker, missing, spared=prefix)
        super().take(segment, copy, hit)
        worker.drop(blocks)

    def evict(self, index: int, count: int, spared: Prefix | None = None) -> None:
        """Free at least ``count`` more blocks on R-worker ``index``, or all that prefixes except ``spared`` use.
        The least recently used prefixes go first.
        """
        worker = self._workers[index]
        target = worker.free + min(count, worker.cached)
        for prefix in list(worker.prefixes.values()):
            if worker.free >= target:
                return
            if prefix is not spared:
                self.shorten(prefix, 0)

    def shorten(self, prefix: Prefix, keep: int) -> None:
        """Release ``prefix`` as a whole, unless all its blocks are kept."""
        if keep < max(1, len(prefix.blocks)):
            super().shorten(prefix, 0)

    def _found_by(self, prefix: Prefix, keep: int) -> list[bytes]:
        return prefix.block_hashes[-1:]


class States(IndexedSource, Keeper):
    """Keeps states of prompts at checkpoints, and states of sequences that give up their cache.
    ``most_kept``: most states, over all R-workers. If a sequence has several segments, only states within the first
    segment are kept.
    """

    copies_all = True
    _index: StateIndex

    def __init__(
        self,
        workers: Workers,
        index: StateIndex,
        ids: CacheIds,
        names: Names,
        most_kept: int,
        worth_blocks: int,
        segment_tokens: int = UNLIMITED,
    ) -> None:
        """``worth_blocks``: how many blocks of tokens take as much memory as one state."""
        super().__init__(workers, index)
        self._segment_tokens = segment_tokens
        self._ids, self._names = ids, names
        self._most_kept, self._interval = most_kept, 1
        # Least number of token blocks between checkpoints, per block of memory that a state takes
        states_share = 4
        while self._interval < states_share * worth_blocks:
            self._interval *= 2
        self._seen: dict[bytes, bool] = {}

    def hits(self, sequence: TokenSequence) -> dict[int, Hit]:
        return self._index.longest(sequence, usable_hashes(sequence, self._workers.block_size), self)

    def arrive(self, sequence: TokenSequence) -> None:
        """Record the block where ``sequence`` begins to differ from earlier prompts, as a checkpoint."""
        usable, before = usable_hashes(sequence, self._workers.block_size), self._seen
        shared = next((depth for depth in range(len(usable), 0, -1) if usable[depth - 1] in before), 0)
        for depth, block_hash in enumerate(usable, 1):
            before[block_hash] = before.pop(block_hash, False) or depth == shared
        # Block hashes of the latest prompts to remember, so that prefixes common to several prompts are found
        most_seen = 1 << 16
        while len(before) > most_seen:
            del before[next(iter(before))]

    def name(self, sequence: TokenSequence, hit: Hit | None) -> int:
        """Return the prefix's id if ``hit`` is the sequence's own, a new id after a preemption, else the sequence's id.
        After a preemption, the prefix that the sequence left may still use the sequence's id.
        """
        if hit and hit.is_own:
            return hit.prefix.prefix_id
        return self._ids.new() if sequence.was_preempted else sequence.sequence_id

    def rows_to_stop(self, sequence: TokenSequence, most: int) -> int:
        """Return the number of rows up to the next checkpoint in the prompt of ``sequence``, at most ``most``."""
        cached, size = sequence.num_cached, self._workers.block_size
        for depth in range(cached // size + 1, (cached + most) // size + 1):
            if self._is_checkpoint(sequence, depth):
                return depth * size - cached
        return most

    def keep(self, sequence: TokenSequence) -> None:
        """Keep a copy of the state of ``sequence`` if it stopped at a checkpoint and blocks for the copy are free."""
        num_blocks, rest = divmod(sequence.num_cached, self._workers.block_size)
        if rest or not self._is_checkpoint(sequence, num_blocks):
            return
        origin, segment = self._ids.new(), sequence.tail
        for copy in segment.copies:
            worker, hashes = self._workers[copy.worker], sequence.block_hashes[:num_blocks]
            if known := self._index.ending(copy.worker, hashes[-1], []):
                self._index.touch(known)
            elif self.make_place(1) and self._index.make_room(copy.worker, self._workers.sizes.fixed):
                worker.grow(self._workers.sizes.fixed)
                prefix = self._keep(self._ids.new(), segment, copy, hashes, origin)
                self._names.name(prefix.prefix_id, sequence.sequence_id, 0)
                worker.fork(prefix.prefix_id, segment.cache_id, segment.num_tokens)
                worker.drop(prefix.own)
                copy.prefix_id = prefix.prefix_id

    def leave(self, sequence: TokenSequence) -> bool:
        """Keep all cached tokens of ``sequence`` under its cache id; return False if they are not kept."""
        num_blocks = sequence.num_cached // self._workers.block_size
        if not self._most_kept or not num_blocks or sequence.has_several:
            return False
        segment, tokens = sequence.tail, sequence.tokens(0, sequence.num_cached)
        extend_hashes(sequence.block_hashes, tokens, self._workers.block_size)
        hashes, rest = sequence.block_hashes[:num_blocks], tokens[num_blocks * self._workers.block_size :]
        known = [self._index.ending(copy.worker, hashes[-1], rest) for copy in segment.copies]
        for prefix in known:
            if prefix:
                self._index.touch(prefix)
        if any(known) or not self.make_place(len(segment.copies)):
            return False
        origin = self._ids.new()
        for copy in segment.copies:
            contains = tuple(self._index.resting(copy.worker, tokens, hashes))
            prefix = self._keep(segment.cache_id, segment, copy, hashes, origin, rest, contains)
            copy.shared += prefix.own
        self._names.name(segment.cache_id, sequence.sequence_id, 0)
        return True

    def make_place(self, count: int) -> bool:
        """Release the least recently used states of the R-worker with most states, until ``count`` more may be kept.
        Return False if ``count`` is above the limit.
        """
        workers = list(self._workers)
        while count <= self._most_kept < count + sum(len(worker.prefixes) for worker in workers):
            fullest = max(workers, key=lambda worker: len(worker.prefixes))
            self._index.shorten(next(iter(fullest.prefixes.values())), 0)
        return count <= self._most_kept

    def _keep(
        self,
        name: int,
        segment: Segment,
        copy: Copy,
        hashes: list[bytes],
        origin: int,
        rest: Sequence[int] = (),
        contains: tuple[bytes, ...] = (),
    ) -> Prefix:
        own = [Block() for _ in range(self._workers.sizes.blocks_of_copy(len(rest)))]
        blocks = list(copy.share(len(hashes)))
        prefix = Prefix(name, copy.worker, list(hashes), blocks, origin, own, list(rest), contains)
        self._index.add(prefix)
        self._index.touch(prefix)
        return prefix

    def _is_checkpoint(self, sequence: TokenSequence, num_blocks: int) -> bool:
        last = (min(sequence.num_prefill, self._segment_tokens) - 1) // self._workers.block_size
        if not self._most_kept or not 0 < num_blocks <= last:
            return False
        wanted = self._seen.get(sequence.block_hashes[num_blocks - 1], False)
        return wanted or num_blocks == last or num_blocks % self._interval == 0

    def is_worth(self, sequence: TokenSequence, num_blocks: int) -> bool:
        return True

    def will_keep(self, leader: TokenSequence, num_blocks: int) -> bool:
        ahead = leader.num_cached < num_blocks * self._workers.block_size
        return ahead and self._is_checkpoint(leader, num_blocks)
