"""Prefix caching: what a sequence can take over from others, and what it leaves to them."""

from __future__ import annotations

import hashlib
import itertools
from array import array

from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.worker_state import Block, Chain, Workers
from fastdecode.types import Verb


class PrefixIndex:
    """Chains of full blocks, found by the hash of all tokens up to a block's end.

    What has to be said to an R-worker about them goes to its controls.
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

    def __init__(self, workers: Workers, enabled: bool) -> None:
        self.enabled = enabled
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

    def begin(self, sequence: Sequence, hit: tuple[int, Chain] | None) -> None:
        """``sequence`` starts on its R-worker, from ``hit`` if it has one."""
        if sequence.output_token_ids == []:
            self.num_queries += self.enabled
            self.num_hit_tokens += hit[0] * self._workers.block_size if hit else 0
        depth = hit[0] if hit else 0
        for block_hash in sequence.block_hashes[depth:]:
            self._computing.setdefault(block_hash, sequence)
        if hit is None:
            return
        chain, worker = hit[1], self._workers[sequence.worker]
        self._index.touch(chain)
        sequence.shared = chain.blocks[:depth]
        worker.hold(sequence.shared)
        worker.controls.append((int(Verb.FORK), sequence.sequence_id, chain.chain_id, sequence.num_cached))

    def stop_computing(self, sequence: Sequence) -> None:
        """No sequence need wait for ``sequence`` any more: its prompt is cached, or it left."""
        for block_hash in sequence.block_hashes:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def share(self, sequence: Sequence, num_blocks: int) -> list[Block]:
        """The first ``num_blocks`` full blocks of ``sequence``, which others may hold from now on."""
        sequence.shared += [Block() for _ in range(num_blocks - len(sequence.shared))]
        return sequence.shared[:num_blocks]

    def retain(self, sequence: Sequence) -> None:
        """Keep the full blocks of a running sequence, in place of what was kept of it before."""
        num_full = sequence.num_cached // self._workers.block_size
        if not self.enabled or num_full == 0:
            return
        num_tokens = num_full * self._workers.block_size
        extend_hashes(sequence.block_hashes, sequence.tokens(0, num_tokens), self._workers.block_size)
        hashes = sequence.block_hashes[:num_full]
        depth, known = self._index.longest(hashes).get(sequence.worker, (0, None))
        if known and depth == num_full:
            self._index.touch(known)
            return
        chain = Chain(next(self._chain_ids), sequence.worker, hashes, self.share(sequence, num_full))
        self._index.add(chain)
        worker = self._workers[sequence.worker]
        worker.controls.append((int(Verb.FORK), chain.chain_id, sequence.sequence_id, num_tokens))
        if before := worker.chains.get(sequence.chain_id or 0):
            self._index.shorten(before, 0)
        sequence.chain_id = chain.chain_id

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
