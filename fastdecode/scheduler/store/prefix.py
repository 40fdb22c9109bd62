"""Prefix caching: what a sequence can take over from others, and what it leaves to them."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fastdecode.core.held import HeldSequence
from fastdecode.core.placing import UNLIMITED
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.place import Block, Copy, Segment
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
        """Whether a longer prefix of the same R-worker has all of ``prefix``."""
        holders = self._by_hash[prefix.block_hashes[-1]].values()
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
            keep = len(prefix.blocks)
            freed = 0
            while keep and worker.free + freed < target and not prefix.blocks[keep - 1].num_sequences:
                keep -= 1
                freed += prefix.blocks[keep].num_prefixes == 1
            if keep < len(prefix.blocks):
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
        worker.forget(reversed(prefix.blocks[keep:]))
        worker.forget(prefix.own)
        for block_hash in self._found_by(prefix, keep):
            holders = self._by_hash[block_hash]
            del holders[prefix.worker, prefix.prefix_id]
            if not holders:
                del self._by_hash[block_hash]
        del prefix.blocks[keep:], prefix.block_hashes[keep:]
        if keep:
            worker.truncate(prefix.prefix_id, keep * self._workers.block_size)
        else:
            del worker.prefixes[prefix.prefix_id]
            worker.release(prefix.prefix_id)


class PrefixCache:
    """Retains full blocks of prompts and outputs until their room is needed; disabled it retains nothing.

    Retained sequences have negative ids on their R-workers, so that they meet no running one's.
    """

    def __init__(
        self,
        workers: Workers,
        enabled: bool,
        segment_tokens: int = UNLIMITED,
        index: Callable[[Workers], PrefixIndex] = PrefixIndex,
    ) -> None:
        self.enabled = enabled
        self.segment_tokens = segment_tokens
        self.num_queries = 0
        self.num_hit_tokens = 0
        self._workers = workers
        self._index = index(workers)
        self._ids = itertools.count(-1, -1)
        self._computing: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        """Retained sequences."""
        return sum(len(worker.prefixes) for worker in self._workers)

    @property
    def is_awaited(self) -> bool:
        """True while a sequence computes blocks that others may follow."""
        return bool(self._computing)

    def arrive(self, sequence: Sequence) -> None:
        """Hash what ``sequence`` is about to compute."""
        if self.enabled:
            tokens = sequence.tokens(0, sequence.num_prefill)
            extend_hashes(sequence.block_hashes, tokens, self._workers.block_size)

    def hits(self, sequence: Sequence) -> dict[int, Hit]:
        """For each R-worker with a beginning worth taking: the number of its blocks, and the prefix that has them.

        Worth taking is one at least as long as what remains, whose attention then runs on the R-worker. At least one
        token is always computed, since its logits are sampled.
        """
        found = self._index.longest(sequence, self._usable(sequence))
        return {worker: hit for worker, hit in found.items() if self.is_worth(sequence, hit.num_blocks)}

    def lookup(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Hashes of the blocks that ``sequence`` could begin with, and how many of them are cached."""
        usable = self._usable(sequence)
        return usable, self._num_cached(sequence, usable)

    def is_within_another(self, prefix: Prefix) -> bool:
        """Whether a longer prefix of the same R-worker has all of ``prefix``."""
        return self._index.is_within_another(prefix)

    def now(self, seconds: float) -> None:
        """What is used from here on is used at ``seconds``."""
        self._index.now_seconds = seconds

    def take_back(self, prefix: Prefix) -> None:
        """Retain ``prefix``, which has come back: its R-worker has it, in blocks that are free here."""
        worker, count = self._workers[prefix.worker], len(prefix.block_hashes)
        prefix.blocks = [Block(num_sequences=0) for _ in range(count)]
        worker.free -= count
        worker.cached += count
        self._index.add(prefix)

    def ways(self, hit: Hit | None) -> tuple[Hit | None, ...]:
        """What a sequence may begin from where ``hit`` is the longest, best first."""
        return (hit,)

    def leader(self, sequence: Sequence) -> Sequence | None:
        """A sequence that is computing a longer beginning of ``sequence`` right now than any that is cached."""
        usable = self._usable(sequence)
        for depth in range(len(usable), 0, -1):
            leader = self._computing.get(usable[depth - 1])
            if leader and self.is_worth(sequence, depth) and self._leaves(leader, depth):
                return leader if depth > self._num_cached(sequence, usable) else None
        return None

    def new_id(self) -> int:
        """For something else than a sequence that R-workers hold."""
        return next(self._ids)

    def name(self, sequence: Sequence) -> int:
        """What R-workers are to call the first segment of ``sequence``, which is about to start."""
        return sequence.sequence_id

    def until_stop(self, sequence: Sequence, most: int) -> int:
        """Rows of at most ``most`` of a prompt up to where it is to stop for something to be kept."""
        return most

    def pass_by(self, sequence: Sequence) -> None:
        """More of the prompt of ``sequence`` is cached."""

    def pieces(self, sequence: Sequence, hit: Hit) -> list[tuple[int, Prefix]]:
        """Return what ``hit`` has of each range of ``sequence``: the number of its blocks, and a prefix that has
        them."""
        depth, last, _ = hit
        whole = self.segment_tokens // self._workers.block_size
        found = [self._index.holder(sequence.block_hashes[end - 1]) for end in range(whole, depth, whole)]
        return [*((whole, prefix) for prefix in found if prefix), (depth - whole * len(found), last)]

    def begin(self, sequence: Sequence, hit: Hit | None) -> None:
        """``sequence`` starts, from ``hit`` if it has one, and computes the rest for those that follow it."""
        if sequence.output_token_ids == []:
            self.num_queries += self.enabled
            self.num_hit_tokens += hit.num_tokens if hit else 0
        for block_hash in sequence.block_hashes[hit.num_blocks if hit else 0 :]:
            self._computing.setdefault(block_hash, sequence)

    def share_with(self, segment: Segment, copy: Copy, count: int, prefix: Prefix) -> None:
        """``copy`` of ``segment`` begins with ``count`` blocks of ``prefix``, on the same R-worker."""
        worker = self._workers[prefix.worker]
        self._index.touch(prefix)
        segment.num_tokens = count * self._workers.block_size + len(prefix.rest)
        copy.shared = prefix.blocks[:count]
        worker.hold(copy.shared)
        worker.fork(segment.cache_id, prefix.prefix_id, segment.num_tokens)

    def twin(self, hit: Hit) -> Hit | None:
        """Return the same beginning on another R-worker, bit for bit, if there is one."""
        twin = self._index.twin(hit.prefix, hit.num_blocks)
        return hit._replace(prefix=twin) if twin else None

    def stop_computing(self, sequence: Sequence) -> None:
        """No sequence need wait for ``sequence`` any more: its prompt is cached, or it left."""
        for block_hash in sequence.block_hashes:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def share(self, copy: Copy, num_blocks: int) -> list[Block]:
        """The first ``num_blocks`` full blocks of ``copy``, which others may hold from now on."""
        copy.shared += [Block() for _ in range(num_blocks - len(copy.shared))]
        return copy.shared[:num_blocks]

    def take_over(self, sequence: Sequence) -> bool:
        """Keep what ``sequence``, which gives up its cache, leaves. True where that is the cache as it is, so that no
        R-worker is to release it."""
        self.retain(sequence)
        return False

    def retain(self, sequence: Sequence) -> None:
        """Keep the full blocks of a running sequence, in place of what was kept of it before."""
        num_full = sequence.num_cached // self._workers.block_size
        if not self.enabled or num_full == 0:
            return
        num_tokens = num_full * self._workers.block_size
        extend_hashes(sequence.block_hashes, sequence.tokens(0, num_tokens), self._workers.block_size)
        origin = self.new_id()
        for segment in sequence.segments[: sequence.num_closed + 1]:
            for copy in segment.copies:
                self._retain(sequence, segment, copy, origin)

    def _retain(self, sequence: Sequence, segment: Segment, copy: Copy, origin: int) -> None:
        """Keep the full blocks of one copy of a segment."""
        first, count = segment.start // self._workers.block_size, segment.num_tokens // self._workers.block_size
        worker, hashes = self._workers[copy.worker], sequence.block_hashes[first : first + count]
        if count == 0:
            return
        if known := self._index.on(copy.worker, hashes[-1]):
            self._index.touch(known)
            return
        prefix = Prefix(self.new_id(), copy.worker, hashes, self.share(copy, count), origin)
        self._index.add(prefix)
        worker.fork(prefix.prefix_id, segment.cache_id, count * self._workers.block_size)
        if before := worker.prefixes.get(copy.prefix_id or 0):
            self._index.shorten(before, 0)
        copy.prefix_id = prefix.prefix_id

    def adopt(self, index: int, held: Iterable[HeldSequence], known: Mapping[int, list[int]]) -> int:
        """R-worker ``index`` holds these sequences of an S-worker before this one, with their ``known`` tokens, by id:
        retain the full blocks of those, and have it forget the rest. Returns the tokens that are retained."""
        worker, size = self._workers[index], self._workers.block_size
        blocks: defaultdict[int, Block] = defaultdict(lambda: Block(num_sequences=0))
        depths = {each: min(each.num_tokens, len(known.get(each.cache_id, ()))) // size for each in held}
        for each in sorted(held, key=lambda each: depths[each] > 0):  # first those to forget, whose ids may come again
            if self.enabled and (depth := depths[each]):
                hashes: list[bytes] = []
                extend_hashes(hashes, known[each.cache_id][: depth * size], size)
                chain = [blocks[block] for block in each.blocks[:depth]]
                num_new = sum(block.num_prefixes == 0 for block in chain)
                worker.free -= num_new
                worker.cached += num_new
                prefix_id = self.new_id()
                self._index.add(Prefix(prefix_id, index, hashes, chain, each.cache_id))
                worker.fork(prefix_id, each.cache_id, depth * size)
            worker.release(each.cache_id)
        return sum(depths.values()) * size if self.enabled else 0

    def forget_beyond(self, copy: Copy, num_tokens: int) -> None:
        """Forget what was kept of ``copy`` beyond its first ``num_tokens`` tokens: it is wrong."""
        prefix = self._workers[copy.worker].prefixes.get(copy.prefix_id or 0)
        if prefix and len(prefix.blocks) > num_tokens // self._workers.block_size:
            self._index.shorten(prefix, num_tokens // self._workers.block_size)

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Evict until ``num_blocks`` are free, or nothing is left to evict; True when they are free then."""
        missing = num_blocks - self._workers[worker].free
        if missing > 0:
            self._index.evict(worker, missing)
        return self._workers[worker].free >= num_blocks

    def reset(self) -> None:
        """Forget everything; running sequences go on."""
        for index in range(len(self._workers)):
            self._index.clear(index)

    def lose(self, worker: int) -> None:
        """``worker`` is gone with what it retained."""
        self._index.clear(worker)

    def _usable(self, sequence: Sequence) -> list[bytes]:
        return sequence.block_hashes[: (sequence.num_prefill - 1) // self._workers.block_size] if self.enabled else []

    def _num_cached(self, sequence: Sequence, usable: list[bytes]) -> int:
        """How many of the ``usable`` blocks of ``sequence`` are cached, on the R-worker that has most of them."""
        return max((hit.num_blocks for hit in self._index.longest(sequence, usable).values()), default=0)

    def is_worth(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether so many blocks, and what remains then, is better than all of ``sequence`` computed."""
        return 2 * num_blocks * self._workers.block_size >= sequence.num_prefill

    def _leaves(self, leader: Sequence, num_blocks: int) -> bool:
        """Whether others can begin with the first ``num_blocks`` blocks that ``leader`` computes."""
        return True


def extend_hashes(block_hashes: list[bytes], token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``block_hashes`` lacks; each covers all before it."""
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        before = block_hashes[-1] if block_hashes else b""
        block = array("q", token_ids[start : start + block_size]).tobytes()
        block_hashes.append(hashlib.blake2b(before + block, digest_size=16).digest())
