"""The source of parked prefixes: chains of blocks on R-workers' disks, and prefixes on their way to and from there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.core.parked import Chain
from fastdecode.scheduler.names import CacheIds
from fastdecode.scheduler.places.place import Block
from fastdecode.scheduler.places.workers import Prefix, Workers
from fastdecode.scheduler.prefix.index import PrefixIndex, usable_hashes
from fastdecode.scheduler.prefix.source import Keeper, Source
from fastdecode.scheduler.sequence import TokenSequence


class Beginning(NamedTuple):
    """The first ``num_blocks`` blocks of ``chain``, which R-worker ``worker`` has parked."""

    worker: int
    num_blocks: int
    chain: Chain


@dataclass(eq=False)
class Waking:
    """A prefix on its way back, to be ``prefix_id`` on its R-worker, which keeps blocks for it; ``num_tokens`` are
    there."""

    beginning: Beginning
    prefix_id: int
    block_hashes: list[bytes]
    num_tokens: int = 0


@dataclass
class WakeCounts:
    """Prefixes that came back from disks, their tokens, and how many did not come back though they were listed."""

    num_woken: int = 0
    num_tokens: int = 0
    num_failed: int = 0


class ParkedChains:
    """What R-workers have parked, found by the hash of all tokens up to the end of a piece, or of the chain."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[int, bytes], Chain] = {}
        self._by_mark: dict[bytes, dict[tuple[int, bytes], Chain]] = {}

    def __len__(self) -> int:
        """Chains."""
        return len(self._by_name)

    def add(self, worker: int, chain: Chain) -> None:
        """R-worker ``worker`` has ``chain``."""
        self._by_name[worker, chain.name] = chain
        for mark in chain.marks:
            self._by_mark.setdefault(mark, {})[worker, chain.name] = chain

    def remove(self, worker: int, name: bytes) -> None:
        """It has it no more; no effect where it had not."""
        chain = self._by_name.pop((worker, name), None)
        for mark in chain.marks if chain else ():
            del self._by_mark[mark][worker, name]
            if not self._by_mark[mark]:
                del self._by_mark[mark]

    def forget(self, worker: int) -> None:
        """R-worker ``worker`` is gone."""
        for name in [name for each, name in self._by_name if each == worker]:
            self.remove(worker, name)

    def has(self, worker: int, name: bytes) -> bool:
        """Whether R-worker ``worker`` has the chain ``name``, or one that goes on from it, as far as marks tell."""
        return any(each == worker for each, _ in self._by_mark.get(name, ()))

    def within(self, worker: int, block_hashes: Iterable[bytes]) -> list[bytes]:
        """Return names of the chains of ``worker`` that end within blocks of these hashes."""
        return [name for name in block_hashes if (worker, name) in self._by_name]

    def longest(self, block_hashes: list[bytes], workers: list[int]) -> Beginning | None:
        """Return the longest beginning of blocks of these hashes that one of ``workers`` has."""
        for depth in range(len(block_hashes), 0, -1):
            for (worker, _), chain in self._by_mark.get(block_hashes[depth - 1], {}).items():
                if worker in workers:
                    return Beginning(worker, depth, chain)
        return None


class Parked(Source):
    """Knows what is on disks. Nothing is taken from there at once: a prefix is woken first, and then retained.

    ``chains``: on the disks. ``counts``: of what came back.
    """

    def __init__(self, workers: Workers, index: PrefixIndex, ids: CacheIds, kept: Keeper) -> None:
        self.chains, self.counts = ParkedChains(), WakeCounts()
        self._workers, self._index, self._ids, self._kept = workers, index, ids, kept

    def forget(self, worker: int) -> None:
        self.chains.forget(worker)

    def set_clock(self, now_seconds: float) -> None:
        """Set the time at which prefixes are used from here on."""
        self._index.now_seconds = now_seconds

    def wanted(self, sequence: TokenSequence) -> Beginning | None:
        """Return what ``sequence``, which waits, would begin from if it was there: longer than what is, and worth
        it."""
        if not len(self.chains):
            return None
        usable = usable_hashes(sequence, self._workers.block_size)
        cached = self._index.num_cached(sequence, usable, self)
        found = self.chains.longest(usable[cached:], self._workers.accepting)
        if found is None:
            return None
        found = found._replace(num_blocks=found.num_blocks + cached)
        return found if self._kept.is_worth(sequence, found.num_blocks) else None

    def begin(self, sequence: TokenSequence, beginning: Beginning) -> Waking | None:
        """Take blocks for ``beginning``, of ``sequence``; None if there are none, or not for the sequence too."""
        worker, needed = self._workers[beginning.worker], self._workers.blocks_for(sequence.num_tokens + 1)
        if needed > worker.available or not self._index.make_room(beginning.worker, beginning.num_blocks):
            return None
        worker.grow(beginning.num_blocks)
        hashes = sequence.block_hashes[: beginning.num_blocks]
        return Waking(beginning, self._ids.new(), hashes)

    def woken(self, waking: Waking, sequence: TokenSequence) -> None:
        """Retain ``waking``, which is there now, as used just now; ``sequence``, which waited for it, starts there."""
        worker, count = waking.beginning.worker, waking.beginning.num_blocks
        sequence.woken_on = worker
        self._workers[worker].cached += count
        blocks = [Block(num_sequences=0) for _ in range(count)]
        self._index.add(Prefix(waking.prefix_id, worker, waking.block_hashes, blocks, is_parked=True))
        self.counts.num_woken += 1
        self.counts.num_tokens += count * self._workers.block_size

    def failed(self, waking: Waking) -> None:
        """It does not come; what came of it is to be released."""
        beginning = waking.beginning
        self.chains.remove(beginning.worker, beginning.chain.name)
        self._workers[beginning.worker].grow(-beginning.num_blocks)
        if waking.num_tokens:
            self._workers[beginning.worker].release(waking.prefix_id)
        self.counts.num_failed += 1

    def mark_parked(self, worker: int) -> None:
        """Mark the prefixes of R-worker ``worker`` that its disk has already."""
        for prefix in self._workers[worker].prefixes.values():
            if not prefix.is_parked and prefix.blocks and self.chains.has(worker, prefix.block_hashes[-1]):
                prefix.is_parked = not self._index.is_within_another(prefix)

    def next_to_park(self, worker: int, unused_since: float) -> tuple[Prefix, Chain] | None:
        """Return a prefix of R-worker ``worker`` that was not used since then, or may be evicted soon, and is on no
        disk."""
        state = self._workers[worker]
        # Prefixes are parked before their time where less than one block in so many is free: they may be evicted soon
        least_free = 10
        is_short = state.free * least_free < state.num_blocks
        for prefix in state.prefixes.values():
            if prefix.is_parked or not prefix.blocks or self._index.is_within_another(prefix):
                continue
            if prefix.used_seconds > unused_since and not is_short:
                return None
            if not self.chains.has(worker, prefix.block_hashes[-1]):
                return prefix, Chain.of(prefix.block_hashes, self._workers.block_size)
        return None

    def parked(self, prefix: Prefix, chain: Chain | None) -> None:
        """``chain``, of ``prefix``, is on the disk; None: it could not be, and is not to be tried again."""
        prefix.is_parked = True
        if chain:
            self.chains.add(prefix.worker, chain)

    def dropped(self, worker: int, names: Iterable[bytes]) -> None:
        """These chains of R-worker ``worker`` are on its disk no more."""
        for name in names:
            self.chains.remove(worker, name)
