"""Prefix caching: what a sequence can take over from others, and what it leaves to them."""

from __future__ import annotations

import hashlib
import itertools
from array import array

from fastdecode.scheduler.ranges import UNLIMITED, Range
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.worker_state import Block, Chain, Workers
from fastdecode.types import Verb


class PrefixIndex:
    """Chains of full blocks, found by the hash of all tokens up to a block's end.

    A chain holds blocks of one range, so what several ranges hold is found as a chain of each. What has to be said to
    an R-worker about them goes to its controls.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._by_hash: dict[bytes, dict[int, Chain]] = {}

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

    def holder(self, block_hash: bytes) -> Chain | None:
        """A chain that has the block, and with it all blocks of its range before that one."""
        return next(iter(self._by_hash.get(block_hash, {}).values()), None)

    def on(self, worker: int, block_hash: bytes) -> Chain | None:
        """A chain of ``worker`` that has the block."""
        return next((each for each in self._by_hash.get(block_hash, {}).values() if each.worker == worker), None)

    def twin(self, chain: Chain, num_blocks: int) -> Chain | None:
        """The other copy of what ``chain`` retains, if it still has the first ``num_blocks`` blocks."""
        holders = self._by_hash[chain.block_hashes[num_blocks - 1]].values()
        return next((each for each in holders if each.origin == chain.origin and each.worker != chain.worker), None)

    def touch(self, chain: Chain) -> None:
        """``chain`` was used just now."""
        self._workers[chain.worker].chains.move_to_end(chain.chain_id)

    def add(self, chain: Chain) -> None:
        """Retain ``chain``, whose blocks a running sequence holds."""
        for block in chain.blocks:
            block.num_chains += 1
        self._workers[chain.worker].chains[chain.chain_id] = chain
        for block_hash in chain.block_hashes:
            self._by_hash.setdefault(block_hash, {})[chain.chain_id] = chain

    def evict(self, index: int, count: int) -> None:
        """Free at least ``count`` more blocks if the cache holds so many, from the ends of the oldest chains."""
        worker = self._workers[index]
        target = worker.free + min(count, worker.cached)
        for chain in list(worker.chains.values()):
            keep = len(chain.blocks)
            freed = 0
            while keep and worker.free + freed < target and not chain.blocks[keep - 1].num_sequences:
                keep -= 1
                freed += chain.blocks[keep].num_chains == 1
            if keep < len(chain.blocks):
                self.shorten(chain, keep)
            if worker.free >= target:
                return

    def clear(self, index: int) -> None:
        """Forget all chains of an R-worker."""
        for chain in list(self._workers[index].chains.values()):
            self.shorten(chain, 0)

    def shorten(self, chain: Chain, keep: int) -> None:
        """Keep only the first ``keep`` blocks of a chain."""
        worker = self._workers[chain.worker]
        worker.forget(reversed(chain.blocks[keep:]))
        for block_hash in chain.block_hashes[keep:]:
            holders = self._by_hash[block_hash]
            del holders[chain.chain_id]
            if not holders:
                del self._by_hash[block_hash]
        del chain.blocks[keep:], chain.block_hashes[keep:]
        if keep:
            worker.controls.append((int(Verb.TRUNCATE), chain.chain_id, 0, keep * self._workers.block_size))
        else:
            del worker.chains[chain.chain_id]
            worker.controls.append((int(Verb.RELEASE), chain.chain_id, 0, 0))


class PrefixCache:
    """Retains full blocks of prompts and outputs until their room is needed; disabled it retains nothing.

    Retained sequences have negative ids on their R-workers, so that they meet no running one's.
    """

    def __init__(self, workers: Workers, enabled: bool, range_tokens: int = UNLIMITED) -> None:
        self.enabled = enabled
        self.range_tokens = range_tokens
        self.num_queries = 0
        self.num_hit_tokens = 0
        self._workers = workers
        self._index = PrefixIndex(workers)
        self._chain_ids = itertools.count(-1, -1)
        self._computing: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        """Retained sequences."""
        return sum(len(worker.chains) for worker in self._workers)

    def arrive(self, sequence: Sequence) -> None:
        """Hash what ``sequence`` is about to compute."""
        if self.enabled:
            tokens = sequence.tokens(0, sequence.num_prefill)
            extend_hashes(sequence.block_hashes, tokens, self._workers.block_size)

    def hits(self, sequence: Sequence) -> dict[int, tuple[int, Chain]]:
        """For each R-worker with a beginning worth taking: the number of its blocks, and the chain that has them.

        Worth taking is one at least as long as what remains, whose attention then runs on the R-worker. At least one
        token is always computed, since its logits are sampled.
        """
        found = self._index.longest(self._usable(sequence))
        return {worker: hit for worker, hit in found.items() if self._is_worth(sequence, hit[0])}

    def leader(self, sequence: Sequence) -> Sequence | None:
        """A sequence that is computing a longer beginning of ``sequence`` right now than any that is cached."""
        usable = self._usable(sequence)
        for depth in range(len(usable), 0, -1):
            leader = self._computing.get(usable[depth - 1])
            if leader and self._is_worth(sequence, depth):
                cached = max((hit[0] for hit in self._index.longest(usable).values()), default=0)
                return leader if depth > cached else None
        return None

    def new_id(self) -> int:
        """For something else than a sequence that R-workers hold."""
        return next(self._chain_ids)

    def pieces(self, sequence: Sequence, hit: tuple[int, Chain]) -> list[tuple[int, Chain]]:
        """What ``hit`` has of each range of ``sequence``: the number of its blocks, and a chain that has them."""
        depth, last = hit
        whole = self.range_tokens // self._workers.block_size
        found = [self._index.holder(sequence.block_hashes[end - 1]) for end in range(whole, depth, whole)]
        return [*((whole, chain) for chain in found if chain), (depth - whole * len(found), last)]

    def begin(self, sequence: Sequence, ranges: list[Range], hit: tuple[int, Chain] | None) -> None:
        """``sequence`` starts in ``ranges``, from ``hit`` if it has one."""
        if sequence.output_token_ids == []:
            self.num_queries += self.enabled
            self.num_hit_tokens += hit[0] * self._workers.block_size if hit else 0
        depth = hit[0] if hit else 0
        for block_hash in sequence.block_hashes[depth:]:
            self._computing.setdefault(block_hash, sequence)
        if hit is None:
            return
        for own, (count, chain) in zip(ranges, self.pieces(sequence, hit), strict=False):
            worker = self._workers[own.worker]
            self._index.touch(chain)
            own.num_tokens, own.shared = count * self._workers.block_size, chain.blocks[:count]
            worker.hold(own.shared)
            worker.controls.append((int(Verb.FORK), own.cache_id, chain.chain_id, own.num_tokens))

    def twin(self, hit: tuple[int, Chain]) -> tuple[int, Chain] | None:
        """The same beginning on another R-worker, bit for bit."""
        twin = self._index.twin(hit[1], hit[0])
        return (hit[0], twin) if twin else None

    def begin_copy(self, sequence: Sequence, hit: tuple[int, Chain]) -> list[Block]:
        """The second copy of ``sequence`` starts from the twin of ``hit``, whose blocks it shares."""
        found = self.twin(hit)
        if found is None:
            raise ValueError("a second copy can start from a twin only")
        count, chain = found
        self._index.touch(chain)
        shared = chain.blocks[:count]
        worker = self._workers[chain.worker]
        worker.hold(shared)
        num_tokens = count * self._workers.block_size
        worker.controls.append((int(Verb.FORK), sequence.cache_id, chain.chain_id, num_tokens))
        return shared

    def stop_computing(self, sequence: Sequence) -> None:
        """No sequence need wait for ``sequence`` any more: its prompt is cached, or it left."""
        for block_hash in sequence.block_hashes:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def share(self, held: Range, num_blocks: int) -> list[Block]:
        """The first ``num_blocks`` full blocks of ``held``, which others may hold from now on."""
        held.shared += [Block() for _ in range(num_blocks - len(held.shared))]
        return held.shared[:num_blocks]

    def retain(self, sequence: Sequence) -> None:
        """Keep the full blocks of a running sequence, in place of what was kept of it before."""
        num_full = sequence.num_cached // self._workers.block_size
        if not self.enabled or num_full == 0:
            return
        num_tokens = num_full * self._workers.block_size
        extend_hashes(sequence.block_hashes, sequence.tokens(0, num_tokens), self._workers.block_size)
        origin = self.new_id()
        for each in sequence.closed:
            self._retain(sequence, each, origin)
        tail = sequence.tail
        self._retain(sequence, tail, origin)
        sequence.chain_id = tail.chain_id
        if copy := sequence.copy:
            self._retain(sequence, copy, origin)
            sequence.copy_chain_id = copy.chain_id

    def _retain(self, sequence: Sequence, held: Range, origin: int) -> None:
        """Keep the full blocks of one range, or of a second copy."""
        first, count = held.start // self._workers.block_size, held.num_tokens // self._workers.block_size
        worker, hashes = self._workers[held.worker], sequence.block_hashes[first : first + count]
        if count == 0:
            return
        if known := self._index.on(held.worker, hashes[-1]):
            self._index.touch(known)
            return
        chain = Chain(self.new_id(), held.worker, hashes, self.share(held, count), origin)
        self._index.add(chain)
        num_tokens = count * self._workers.block_size
        worker.controls.append((int(Verb.FORK), chain.chain_id, held.cache_id, num_tokens))
        if before := worker.chains.get(held.chain_id or 0):
            self._index.shorten(before, 0)
        held.chain_id = chain.chain_id

    def forget_beyond(self, held: Range, num_tokens: int) -> None:
        """What was kept of ``held`` beyond its first ``num_tokens`` tokens is wrong."""
        chain = self._workers[held.worker].chains.get(held.chain_id or 0)
        if chain and len(chain.blocks) > num_tokens // self._workers.block_size:
            self._index.shorten(chain, num_tokens // self._workers.block_size)

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

    def _is_worth(self, sequence: Sequence, num_blocks: int) -> bool:
        return 2 * num_blocks * self._workers.block_size >= sequence.num_prefill


def extend_hashes(block_hashes: list[bytes], token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``block_hashes`` lacks; each covers all before it."""
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        before = block_hashes[-1] if block_hashes else b""
        block = array("q", token_ids[start : start + block_size]).tobytes()
        block_hashes.append(hashlib.blake2b(before + block, digest_size=16).digest())
