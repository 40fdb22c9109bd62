"""Prefix caching: what a sequence can take over from others, and what it leaves to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fastdecode.scheduler.blocks import Block, BlockLedger
from fastdecode.scheduler.prefix_index import Chain, Control, PrefixIndex, extend_hashes
from fastdecode.scheduler.sequence import Sequence
from fastdecode.types import Verb


class PrefixCache:
    """Retains full blocks of prompts and outputs while nobody needs their room; disabled it retains nothing.

    Methods that return controls leave it to the scheduler to hand them to the sequence's R-worker, in order. Retained
    sequences have negative ids there, so that they meet no running one's.
    """

    def __init__(self, ledger: BlockLedger, enabled: bool) -> None:
        self.enabled = enabled
        self.num_queries = 0
        self.num_hit_tokens = 0
        self._ledger = ledger
        self._index = PrefixIndex(ledger)
        self._chain_ids = itertools.count(-1, -1)
        self._computing: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        """Retained sequences."""
        return len(self._index)

    def arrive(self, sequence: Sequence) -> None:
        """Hash what ``sequence`` is about to compute."""
        if self.enabled:
            tokens = sequence.tokens(0, sequence.num_prefill)
            extend_hashes(sequence.block_hashes, tokens, self._ledger.block_size)

    def hits(self, sequence: Sequence) -> dict[int, tuple[int, Chain]]:
        """For each R-worker with a beginning worth taking: the number of its blocks, and the chain that has them.

        Worth taking is one at least as long as what remains, whose attention then runs on the R-worker. One token at
        least is always computed, since somebody has to sample.
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

    def begin(self, sequence: Sequence, hit: tuple[int, Chain] | None) -> list[Control]:
        """``sequence`` starts, from ``hit`` if it has one."""
        if sequence.output_token_ids == []:
            self.num_queries += self.enabled
            self.num_hit_tokens += hit[0] * self._ledger.block_size if hit else 0
        depth = hit[0] if hit else 0
        for block_hash in sequence.block_hashes[depth:]:
            self._computing.setdefault(block_hash, sequence)
        if hit is None:
            return []
        chain = hit[1]
        self._index.touch(chain)
        sequence.shared = chain.blocks[:depth]
        self._ledger.hold(sequence.worker, sequence.shared)
        sequence.num_cached = depth * self._ledger.block_size
        return [(int(Verb.FORK), sequence.sequence_id, chain.chain_id, sequence.num_cached)]

    def stop_computing(self, sequence: Sequence) -> None:
        """Nobody need wait for ``sequence`` any more: its prompt is cached, or it left."""
        for block_hash in sequence.block_hashes:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def share(self, sequence: Sequence, num_blocks: int) -> list[Block]:
        """The first ``num_blocks`` full blocks of ``sequence``, which others may hold from now on."""
        sequence.shared += [Block() for _ in range(num_blocks - len(sequence.shared))]
        return sequence.shared[:num_blocks]

    def retain(self, sequence: Sequence) -> list[Control]:
        """Keep the full blocks of a running sequence, in place of what was kept of it before."""
        num_full = sequence.num_cached // self._ledger.block_size
        if not self.enabled or num_full == 0:
            return []
        num_tokens = num_full * self._ledger.block_size
        extend_hashes(sequence.block_hashes, sequence.tokens(0, num_tokens), self._ledger.block_size)
        hashes = sequence.block_hashes[:num_full]
        depth, known = self._index.longest(hashes).get(sequence.worker, (0, None))
        if known and depth == num_full:
            self._index.touch(known)
            return []
        chain = Chain(next(self._chain_ids), sequence.worker, hashes, self.share(sequence, num_full))
        self._index.add(chain)
        controls = [(int(Verb.FORK), chain.chain_id, sequence.sequence_id, num_tokens)]
        if sequence.chain_id is not None:
            controls += filter(None, [self._index.remove(sequence.worker, sequence.chain_id)])
        sequence.chain_id = chain.chain_id
        return controls

    def make_room(self, worker: int, num_blocks: int) -> Iterator[Control]:
        """Evict until ``num_blocks`` are free, or nothing is left to evict."""
        missing = num_blocks - self._ledger.free[worker]
        return self._index.evict(worker, missing) if missing > 0 else iter(())

    def reset(self) -> Iterator[tuple[int, Control]]:
        """Forget everything; yields R-workers with the controls that release it. Running sequences go on."""
        return self._index.clear()

    def join(self) -> None:
        """One more R-worker, which retains nothing."""
        self._index.join()

    def lose(self, worker: int) -> None:
        """``worker`` is gone with what it retained."""
        self._index.lose(worker)

    def _usable(self, sequence: Sequence) -> list[bytes]:
        return sequence.block_hashes[: (sequence.num_prefill - 1) // self._ledger.block_size] if self.enabled else []

    def _is_worth(self, sequence: Sequence, num_blocks: int) -> bool:
        return 2 * num_blocks * self._ledger.block_size >= sequence.num_prefill
