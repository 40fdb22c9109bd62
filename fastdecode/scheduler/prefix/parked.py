"""The source of parked prefixes, which are on R-workers' disks, and of those that are being loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.core.parked import Chain, hash_after
from fastdecode.core.placing import UNLIMITED
from fastdecode.scheduler.names import CacheIds
from fastdecode.scheduler.places.place import Block
from fastdecode.scheduler.places.workers import Prefix, Workers
from fastdecode.scheduler.prefix.index import PrefixIndex, usable_hashes
from fastdecode.scheduler.prefix.source import Keeper, Source
from fastdecode.scheduler.sequence import TokenSequence


class Beginning(NamedTuple):
    """A parked part of a sequence: the first ``num_blocks`` blocks of ``chain`` on the disk of R-worker ``worker``.
    The first ``start`` blocks of the sequence come before; they are in earlier segments.
    """

    worker: int
    num_blocks: int
    chain: Chain
    start: int = 0


@dataclass(eq=False)
class Waking:
    """A prefix that is being loaded as sequence ``prefix_id`` on its R-worker, where blocks are reserved for it.
    ``num_tokens``: tokens loaded until now.
    """

    beginning: Beginning
    prefix_id: int
    block_hashes: list[bytes]
    num_tokens: int = 0


@dataclass
class WakeCounts:
    """Counts of prefixes loaded from disks, of their tokens, and of prefixes that failed to load."""

    num_woken: int = 0
    num_tokens: int = 0
    num_failed: int = 0


class ParkedChains:
    """The parked prefixes (``Chain``), by the hash of all tokens up to the end of a piece or of the last block.
    A piece is ``PIECE_TOKENS`` tokens. ``whole``: they contain recurrent states, so each can only be loaded as a whole.
    """

    def __init__(self, block_size: int, whole: bool) -> None:
        self._block_size, self._whole = block_size, whole
        self._by_name: dict[tuple[int, bytes], Chain] = {}
        self._by_mark: dict[bytes, dict[tuple[int, bytes], Chain]] = {}

    def __len__(self) -> int:
        """Return the number of parked prefixes."""
        return len(self._by_name)

    def add(self, worker: int, chain: Chain) -> None:
        self._by_name[worker, chain.name] = chain
        for mark in self._found_by(chain):
            self._by_mark.setdefault(mark, {})[worker, chain.name] = chain

    def remove(self, worker: int, name: bytes) -> None:
        """Remove the parked prefix ``name`` of R-worker ``worker``; unknown names are ignored."""
        chain = self._by_name.pop((worker, name), None)
        for mark in self._found_by(chain) if chain else ():
            del self._by_mark[mark][worker, name]
            if not self._by_mark[mark]:
                del self._by_mark[mark]

    def forget(self, worker: int) -> None:
        for name in [name for each, name in self._by_name if each == worker]:
            self.remove(worker, name)

    def has(self, worker: int, name: bytes) -> bool:
        if self._whole:
            return (worker, name) in self._by_name
        return any(each == worker for each, _ in self._by_mark.get(name, ()))

    def within(self, worker: int, names: Iterable[bytes]) -> list[bytes]:
        """Return those of ``names`` that name parked prefixes on the disk of ``worker``."""
        return [name for name in names if (worker, name) in self._by_name]

    def longest(
        self, sequence: TokenSequence, block_hashes: list[bytes], start: int, workers: list[int]
    ) -> Beginning | None:
        """Return the longest part of ``sequence`` from block ``start`` on that a disk of ``workers`` has, or None.
        ``block_hashes``: the hashes of the blocks from ``start`` on.
        """
        for depth in range(len(block_hashes), 0, -1):
            fitting = [
                Beginning(worker, depth, chain)
                for (worker, _), chain in self._by_mark.get(block_hashes[depth - 1], {}).items()
                if worker in workers and self._fits(sequence, start + depth, block_hashes[depth - 1], chain)
            ]
            if fitting:
                return max(fitting, key=lambda each: each.chain.rest)
        return None

    def _fits(self, sequence: TokenSequence, num_blocks: int, block_hash: bytes, chain: Chain) -> bool:
        """Return whether ``sequence`` continues, after ``num_blocks`` blocks, with the partly full block of ``chain``.
        At least one more token must follow.
        """
        start, count = num_blocks * self._block_size, chain.rest
        if start + count >= sequence.num_prefill:
            return False
        return not count or hash_after(block_hash, sequence.tokens(start, count)) == chain.name

    def _found_by(self, chain: Chain) -> tuple[bytes, ...]:
        return (chain.last_block,) if self._whole else chain.marks


class Parked(Source):
    """The source of parked prefixes. A prefix is first loaded ("woken") and then retained; it is never used directly.
    ``chains``: the prefixes on disks. ``counts``: counts of loaded prefixes.
    """

    def __init__(
        self, workers: Workers, index: PrefixIndex, ids: CacheIds, kept: Keeper, segment_tokens: int = UNLIMITED
    ) -> None:
        self.chains = ParkedChains(workers.block_size, whole=not workers.sizes.rewinds)
        self.counts = WakeCounts()
        self._workers, self._index, self._ids, self._kept = workers, index, ids, kept
        self._range_blocks = segment_tokens // workers.block_size

    def forget(self, worker: int) -> None:
        self.chains.forget(worker)

    def set_clock(self, now_seconds: float) -> None:
        """Set the time to record for the use of prefixes, until the next call."""
        self._index.now_seconds = now_seconds

    def wanted(self, sequence: TokenSequence) -> Beginning | None:
        """Return the parked prefix that the waiting ``sequence`` should load next; None if loading is not worthwhile.
        The parked prefix must be longer than the cached one. For a sequence of several segments, it is in the first
        segment that is not cached. Whether loading is worthwhile depends on this segment and all cached or parked ones
        that follow.
        """
        if not len(self.chains):
            return None
        usable = usable_hashes(sequence, self._workers.block_size)
        first, depth = None, self._index.num_cached(sequence, usable, self)
        while (found := self._next(sequence, usable, depth)) is not None:
            first, depth = first or found, found.start + found.num_blocks
            if depth % self._range_blocks:
                break
            depth = self._index.cached_from(usable, depth)
        return first if first and self._kept.is_worth(sequence, depth) else None

    def _next(self, sequence: TokenSequence, usable: list[bytes], depth: int) -> Beginning | None:
        """Return the longest parked prefix, within the segment that has block ``depth``, that includes this block.
        Return None if there is none.
        """
        start = depth // self._range_blocks * self._range_blocks
        hashes = usable[depth : start + self._range_blocks]
        found = self.chains.longest(sequence, hashes, depth, self._workers.accepting)
        return found and found._replace(num_blocks=found.num_blocks + depth - start, start=start)

    def begin(self, sequence: TokenSequence, beginning: Beginning) -> Waking | None:
        """Reserve blocks to load ``beginning`` for ``sequence``; return None if too few are free for all its tokens."""
        worker, needed = self._workers[beginning.worker], self._workers.blocks_for(sequence.num_tokens + 1)
        needed = min(needed - beginning.start, self._range_blocks)
        num_own = self._num_own(beginning)
        if needed + num_own > worker.available or not self._kept.make_place(1):
            return None
        if not self._index.make_room(beginning.worker, beginning.num_blocks + num_own):
            return None
        worker.grow(beginning.num_blocks + num_own)
        hashes = sequence.block_hashes[beginning.start : beginning.start + beginning.num_blocks]
        return Waking(beginning, self._ids.new(), hashes)

    def woken(self, waking: Waking, sequence: TokenSequence) -> None:
        """Retain the loaded prefix ``waking`` as used now, and let ``sequence`` start on the same R-worker.
        The prefix gets no second copy: the same tokens on another R-worker may have been computed with other
        arithmetic.
        """
        beginning, origin, size = waking.beginning, self._ids.new(), self._workers.block_size
        worker, count, rest = beginning.worker, beginning.num_blocks, beginning.chain.rest
        sequence.woken_on = worker
        blocks = [Block(num_sequences=0) for _ in range(count)]
        own = [Block(num_sequences=0) for _ in range(self._num_own(beginning))]
        self._workers[worker].cached += count + len(own)
        tokens = sequence.tokens(count * size, rest) if rest else []
        prefix = Prefix(waking.prefix_id, worker, waking.block_hashes, blocks, origin, own, tokens, is_parked=True)
        self._index.add(prefix)
        self.counts.num_woken += 1
        self.counts.num_tokens += count * size + rest

    def _num_own(self, beginning: Beginning) -> int:
        return self._workers.sizes.blocks_of_copy(beginning.chain.rest)

    def failed(self, waking: Waking) -> None:
        """Release the blocks of ``waking``, which failed to load, and forget its parked prefix."""
        beginning = waking.beginning
        self.chains.remove(beginning.worker, beginning.chain.name)
        self._workers[beginning.worker].grow(-beginning.num_blocks - self._num_own(beginning))
        if waking.num_tokens:
            self._workers[beginning.worker].release(waking.prefix_id)
        self.counts.num_failed += 1

    def mark_parked(self, worker: int) -> None:
        """Mark the retained prefixes of R-worker ``worker`` that its disk has as well."""
        for prefix in self._workers[worker].prefixes.values():
            if not prefix.is_parked and prefix.blocks and self.chains.has(worker, prefix.name):
                prefix.is_parked = not self._index.is_within_another(prefix)

    def next_to_park(self, worker: int, unused_since: float) -> tuple[Prefix, Chain] | None:
        """Return a retained prefix of ``worker`` to park: unused since ``unused_since``, or likely to be evicted soon.
        Return None if there is none.
        """
        state = self._workers[worker]
        # Prefixes are parked early if less than 1 / ``least_free`` of the blocks is free, since they may soon be
        # evicted
        least_free = 10
        is_short = state.free * least_free < state.num_blocks
        for prefix in state.prefixes.values():
            if prefix.is_parked or not prefix.blocks or self._index.is_within_another(prefix):
                continue
            if prefix.used_seconds > unused_since and not is_short:
                return None
            if not self.chains.has(worker, prefix.name):
                return prefix, Chain.of(prefix.block_hashes, self._workers.block_size, prefix.rest)
        return None

    def superseded(self, prefix: Prefix) -> list[bytes]:
        """Return the names of parked prefixes on the R-worker's disk that ``prefix`` replaces once it is parked."""
        return self.chains.within(prefix.worker, self._index.contained(prefix))

    def parked(self, prefix: Prefix, chain: Chain | None) -> None:
        """Record that ``prefix`` is on the disk as ``chain``. With None, parking failed and is not tried again."""
        prefix.is_parked = True
        if chain:
            self.chains.add(prefix.worker, chain)

    def dropped(self, worker: int, names: Iterable[bytes]) -> None:
        """Record that the disk of R-worker ``worker`` no longer has the parked prefixes ``names``."""
        for name in names:
            self.chains.remove(worker, name)
