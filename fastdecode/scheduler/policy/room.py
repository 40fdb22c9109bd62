"""Checks whether a sequence fits: free blocks and allowed KV load, now and until it ends."""

from __future__ import annotations

import numpy as np

from fastdecode.core.errors import RequestError
from fastdecode.core.placing import UNLIMITED, pool_holds
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.policy.load_limit import LoadLimit
from fastdecode.scheduler.policy.needs import Needs
from fastdecode.scheduler.prefix.source import Hit
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store


class Room:
    """Checks whether sequences fit R-workers.
    A sequence may have only as many segments on an R-worker as it could have if it were alone there. So the oldest
    sequence can always continue.
    """

    def __init__(self, needs: Needs, limits: Limits, store: Store, load_limit: LoadLimit) -> None:
        self._needs, self._max_num_seqs = needs, limits.max_num_seqs
        self._workers, self._transfers = store.workers, store.transfers
        self._load_limit = load_limit

    def check(self, sequence: TokenSequence) -> None:
        """Raise RequestError if ``sequence`` and its siblings could never run."""
        members = 1 + len(sequence.siblings)
        if members > self._max_num_seqs:
            raise RequestError(f"n is {members}, and max_num_seqs is {self._max_num_seqs}: lower n")
        if self.may_split(sequence) and not self._pool_holds(sequence, self._workers.present):
            raise RequestError(self._too_many_segments(sequence))
        blocks = self._needs.at_most(sequence)
        largest = max(worker.num_blocks for worker in self._workers)
        if blocks > largest:
            raise RequestError(
                f"the request's {members} sequences need {blocks} KV blocks, and the largest R-worker has {largest}: "
                f"lower n or max_tokens, or give more kv_cache_memory"
            )
        self._load_limit.check(self._needs.attended(sequence))

    def may_split(self, sequence: TokenSequence) -> bool:
        """Return whether ``sequence`` may become too long for a single segment."""
        return sequence.max_cached > self._needs.segment_tokens

    def fits_somewhere(self, sequence: TokenSequence) -> bool:
        """Return whether one of the present R-workers, or all of them together, could run ``sequence`` alone."""
        return self._fits_among(sequence, self._workers.present)

    def fits_elsewhere(self, sequence: TokenSequence) -> bool:
        """Return whether an R-worker that is not draining, or all such together, could run ``sequence`` alone."""
        return self._fits_among(sequence, self._workers.accepting)

    def could_hold(self, sequence: TokenSequence, worker: int | slice = slice(None)) -> np.ndarray | bool:
        """Return whether R-worker ``worker`` could run ``sequence`` to its end if nothing else ran there.
        For several R-workers this is an array, bool [num_workers].
        """
        num_blocks = self._workers.num_blocks if isinstance(worker, slice) else self._workers[worker].num_blocks
        could = self._needs.at_most(sequence) <= num_blocks
        return could & self._load_limit.holds(self._needs.attended(sequence), worker)

    def to_begin(self, sequence: TokenSequence, worker: int, hit: Hit | None) -> bool:
        """Return whether ``sequence``, in one segment, can start on ``worker`` now, from prefix ``hit`` if given.
        Its blocks must be free there, and one more for each sequence that is already there, so that none is preempted
        soon.
        """
        taken_over = hit.prefix.blocks[: hit.num_blocks] if hit else []
        # a sequence that starts from the prefix uses these blocks, so they cannot be evicted
        kept = [*taken_over, *(hit.prefix.own if hit else ())]
        needed = self._needs.at_start(sequence) - len(taken_over) + sum(block.num_sequences == 0 for block in kept)
        needed -= len(hit.prefix.own) if hit and hit.is_own else 0
        there = self._workers[worker]
        enough = self._leaves_a_block(needed, there.num_sequences, there.available)
        return bool(enough and self.could_hold(sequence, worker))

    def to_begin_where(self, sequence: TokenSequence, available: np.ndarray) -> np.ndarray:
        """Return, for each R-worker, whether ``sequence`` can start there without a cached prefix: bool [num_workers].
        The load limit is not checked. ``available``: blocks, int64 [num_workers].
        """
        able = self._leaves_a_block(self._needs.at_start(sequence), self._workers.num_sequences, available)
        return able & (self._needs.at_most(sequence) <= self._workers.num_blocks)

    def to_go_on(self, sequence: TokenSequence, num_blocks: int, worker: int) -> bool:
        """Return whether ``sequence``, in one segment of ``num_blocks``, could continue on ``worker`` unpreempted."""
        there = self._workers[worker]
        return num_blocks + there.num_sequences <= there.available and bool(self.could_hold(sequence, worker))

    def to_move(self, sequence: TokenSequence, moved: Segment, worker: int) -> bool:
        """Return whether the segment ``moved`` of ``sequence`` could continue on ``worker`` without preemption."""
        if moved.on(worker) or any(each.segment is moved and each.target == worker for each in self._transfers):
            return False
        needed, there = self._needs.elsewhere(sequence, moved), self._workers[worker]
        if sequence.num_tokens <= self._needs.segment_tokens:
            return self.to_go_on(sequence, needed, worker)
        most = self._needs.sizes_at_end(sequence)[moved.start // self._needs.segment_tokens]
        fits = (np.array(most) <= self.left_for(sequence)[worker]).all()
        return bool(fits) and needed + there.num_sequences <= there.available

    def capacities(self) -> np.ndarray:
        """Return how many tokens the blocks of each R-worker hold: int64 [num_workers]."""
        return self._workers.num_blocks * self._workers.block_size

    def ceilings(self) -> np.ndarray:
        """Return the most KV tokens that each R-worker may attend, given its memory and a strict limit.
        The result is float64 [num_workers].
        """
        return np.minimum(self.capacities(), self._load_limit.ceilings)

    def left_for(self, sequence: TokenSequence) -> np.ndarray:
        """Return the blocks and tokens that ``sequence`` may still take on each R-worker: int64 [num_workers, 2].
        This is what :meth:`alone` returns, less what the segments that exist take when they are full.
        """
        capacities = self.alone(sequence)
        for segment, size in zip(sequence.segments, self._needs.sizes_at_end(sequence), strict=False):
            if segment.home >= 0:
                capacities[segment.home] -= size
        return capacities

    def alone(self, sequence: TokenSequence) -> np.ndarray:
        """Return the blocks and tokens that ``sequence`` could have alone on each R-worker: int64 [num_workers, 2]."""
        tokens = np.minimum(self._load_limit.ceilings, UNLIMITED) // (1 + len(sequence.siblings))
        return np.column_stack([self._workers.num_blocks, tokens.astype(np.int64)])

    def _leaves_a_block(self, needed: int, others: int | np.ndarray, available: int | np.ndarray) -> np.ndarray | bool:
        """Return whether ``available`` blocks suffice for ``needed``, and one more for each of ``others`` sequences."""
        return needed + (0 if self._needs.holds_all_from_start else others) <= available

    def _pool_holds(self, sequence: TokenSequence, among: list[int]) -> bool:
        """Return whether the R-workers ``among`` could start ``sequence`` and its siblings, and run it to its end."""
        capacities = self.alone(sequence)[among]
        sizes = (self._needs.sizes_at_start(sequence), self._needs.sizes_at_end(sequence))
        return all(pool_holds(each, capacities) for each in sizes)

    def _too_many_segments(self, sequence: TokenSequence) -> str:
        length = self._needs.segment_tokens
        num_segments, whole = len(self._needs.sizes_at_end(sequence)), (self._workers.blocks_for(length), length)
        slots = (self.alone(sequence)[self._workers.present] // np.array(whole)).min(axis=1).sum()
        return (
            f"the request needs {num_segments} ranges of {length} tokens, and within kv_load_limit and "
            f"their KV blocks the R-workers have room for {slots}: lower n or max_tokens, or give more "
            f"kv_cache_memory or a higher kv_load_limit"
        )

    def _fits_among(self, sequence: TokenSequence, workers: list[int]) -> bool:
        if self.may_split(sequence):
            return self._pool_holds(sequence, workers)
        return any(self.could_hold(sequence, worker) for worker in workers)
