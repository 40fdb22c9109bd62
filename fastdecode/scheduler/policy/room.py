"""Is there room? Blocks, and the KV load that the user allows, now and to a sequence's end."""

from __future__ import annotations

import numpy as np

from fastdecode.core.errors import RequestError
from fastdecode.scheduler.policy.load_control import LoadControl
from fastdecode.scheduler.policy.range_sizes import Size, pool_holds, sizes_of
from fastdecode.scheduler.schedules import Limits, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.place import UNLIMITED, Segment
from fastdecode.scheduler.store.prefix import Hit
from fastdecode.scheduler.store.store import Store


class Room:
    """What R-workers have room for. A sequence has no more segments on one than it could fill there were it alone, so
    that the oldest can always go on."""

    def __init__(self, schedule: Schedule, limits: Limits, store: Store, load_control: LoadControl) -> None:
        self.segment_tokens = limits.range_tokens
        self._schedule, self._limits = schedule, limits
        self._workers, self._transfers = store.workers, store.transfers
        self._load_control = load_control

    def check(self, sequence: Sequence) -> None:
        """RequestError when ``sequence``, with its siblings, could never run."""
        members = 1 + len(sequence.siblings)
        if members > self._limits.max_num_seqs:
            raise RequestError(f"n is {members}, and max_num_seqs is {self._limits.max_num_seqs}")
        if sequence.max_cached > self.segment_tokens and not self._pool_holds(sequence, self._workers.present):
            raise RequestError(self._too_many_segments(sequence))
        blocks = self._most_blocks(sequence)
        largest = max(worker.num_blocks for worker in self._workers)
        if blocks > largest:
            raise RequestError(
                f"the request's {members} sequences need {blocks} KV blocks, and the largest R-worker has {largest}: "
                f"lower n or max_tokens, or give more kv_cache_memory"
            )
        if self._schedule.stabilizes_load:
            self._load_control.check(self._longest(sequence))

    def fits_somewhere(self, sequence: Sequence) -> bool:
        """Whether one of the R-workers that are there, or all together, could still run ``sequence`` by itself."""
        return self._fits_among(sequence, self._workers.present)

    def fits_elsewhere(self, sequence: Sequence) -> bool:
        """Whether one of the R-workers that do not drain, or all of these, could run ``sequence`` by itself."""
        return self._fits_among(sequence, self._workers.accepting)

    def could_hold(self, sequence: Sequence) -> np.ndarray:
        """Whether each R-worker could run ``sequence`` to its end, were it alone there: bool [num_workers]."""
        could = self._most_blocks(sequence) <= self._workers.num_blocks
        return could & (self._longest(sequence) <= self.load_limits())

    def to_begin(self, sequence: Sequence, index: int, hit: Hit | None) -> bool:
        """Whether ``sequence``, of one segment, can begin on R-worker ``index`` now: its blocks are free there, and one
        more for each sequence that is there already, so that none is preempted at once."""
        if not self._could_hold_on(sequence, index):
            return False
        taken_over = hit[1].blocks[: hit[0]] if hit else []
        needed = self.blocks_for(sequence) - len(taken_over)
        needed += sum(block.num_sequences == 0 for block in taken_over)  # no longer there for the asking
        worker = self._workers[index]
        return needed + (0 if self._schedule.reserves_longest else worker.num_sequences) <= worker.available

    def to_begin_where(self, sequence: Sequence, available: np.ndarray) -> np.ndarray:
        """The same of every R-worker, without a hit: bool [num_workers]. ``available``: blocks, int64 [num_workers]."""
        spare = 0 if self._schedule.reserves_longest else self._workers.num_sequences
        able = self.blocks_for(sequence) + spare <= available
        return able & (self._most_blocks(sequence) <= self._workers.num_blocks)

    def to_copy(self, sequence: Sequence, num_blocks: int, index: int) -> bool:
        """Whether ``num_blocks`` blocks of ``sequence``, of one segment, could go on on R-worker ``index`` without a
        preemption there."""
        worker = self._workers[index]
        return self._could_hold_on(sequence, index) and num_blocks + worker.num_sequences <= worker.available

    def to_move(self, sequence: Sequence, moved: Segment, index: int) -> bool:
        """Whether ``moved``, of ``sequence``, could go on on R-worker ``index`` without a preemption there."""
        if moved.on(index) or any(each.segment is moved and each.target == index for each in self._transfers):
            return False
        needed, worker = self.blocks_to_move(sequence, moved), self._workers[index]
        if sequence.num_tokens <= self.segment_tokens:
            return self.to_copy(sequence, needed, index)
        most = self.sizes_at_end(sequence)[moved.start // self.segment_tokens]
        fits = (np.array(most) <= self.left_for(sequence)[index]).all()
        return bool(fits) and needed + worker.num_sequences <= worker.available

    def blocks_to_move(self, sequence: Sequence, moved: Segment) -> int:
        """Blocks that ``moved``, of ``sequence``, takes elsewhere, the one for the next token included."""
        if sequence.num_tokens <= self.segment_tokens:
            return self.blocks_for(sequence)
        return self._workers.blocks_for(min(moved.num_tokens + 1, self.segment_tokens))

    def blocks_for(self, sequence: Sequence) -> int:
        """Blocks that ``sequence`` holds from its start, its siblings' copies of a partial block included."""
        siblings = len(sequence.siblings)
        if self._schedule.reserves_longest:
            return self._workers.blocks_for(self._limits.max_model_len) * (1 + siblings)
        num_tokens = sequence.num_tokens
        return self._workers.blocks_for(num_tokens) + siblings * (num_tokens % self._workers.block_size > 0)

    def capacities(self) -> np.ndarray:
        """Tokens that the blocks of each R-worker hold: int64 [num_workers]."""
        return self._workers.num_blocks * self._workers.block_size

    def load_limits(self) -> np.ndarray:
        """KV tokens that each R-worker may attend, float64 [num_workers]; infinite unless the user limits them."""
        if self._schedule.stabilizes_load and self._load_control.is_strict:
            return self._load_control.limits
        return np.full(len(self._workers), np.inf)

    def ceilings(self) -> np.ndarray:
        """KV tokens that each R-worker may come to attend, by its memory and a strict limit: float64 [num_workers]."""
        return np.minimum(self.capacities(), self.load_limits())

    def sizes_at_end(self, sequence: Sequence) -> list[Size]:
        """Blocks and tokens of each segment of ``sequence`` at its end."""
        return sizes_of(sequence.max_cached, self.segment_tokens, self._workers.block_size)

    def sizes_at_start(self, sequence: Sequence) -> list[Size]:
        """The same of those that it begins with, its siblings' copies of a partial block included."""
        *others, (blocks, tokens) = sizes_of(sequence.num_tokens, self.segment_tokens, self._workers.block_size)
        return [*others, (blocks + len(sequence.siblings) * (tokens % self._workers.block_size > 0), tokens)]

    def left_for(self, sequence: Sequence) -> np.ndarray:
        """What the segments of ``sequence`` leave to it of :meth:`alone`: int64 [num_workers, 2]."""
        capacities = self.alone(sequence)
        for segment, size in zip(sequence.segments, self.sizes_at_end(sequence), strict=False):
            if segment.copies:
                capacities[segment.home] -= size
        return capacities

    def alone(self, sequence: Sequence) -> np.ndarray:
        """Blocks and tokens that ``sequence``, alone, could have on each R-worker: int64 [num_workers, 2]."""
        tokens = np.minimum(self.load_limits(), UNLIMITED) // (1 + len(sequence.siblings))
        return np.column_stack([self._workers.num_blocks, tokens.astype(np.int64)])

    def _pool_holds(self, sequence: Sequence, among: list[int]) -> bool:
        """Whether the R-workers ``among`` could run ``sequence`` to its end by themselves, and begin its siblings."""
        capacities = self.alone(sequence)[among]
        sizes = (self.sizes_at_start(sequence), self.sizes_at_end(sequence))
        return all(pool_holds(each, capacities) for each in sizes)

    def _too_many_segments(self, sequence: Sequence) -> str:
        sizes, whole = self.sizes_at_end(sequence), (self._workers.blocks_for(self.segment_tokens), self.segment_tokens)
        slots = (self.alone(sequence)[self._workers.present] // np.array(whole)).min(axis=1).sum()
        return (
            f"the request needs {len(sizes)} ranges of {self.segment_tokens} tokens, and within kv_load_limit and "
            f"their KV blocks the R-workers have room for {slots}: lower n or max_tokens, or give more "
            f"kv_cache_memory or a higher kv_load_limit"
        )

    def _fits_among(self, sequence: Sequence, workers: list[int]) -> bool:
        if sequence.max_cached > self.segment_tokens:
            return self._pool_holds(sequence, workers)
        return any(self._could_hold_on(sequence, index) for index in workers)

    def _could_hold_on(self, sequence: Sequence, index: int) -> bool:
        if self._most_blocks(sequence) > self._workers[index].num_blocks:
            return False
        return not self._schedule.stabilizes_load or self._load_control.holds(index, self._longest(sequence))

    def _most_blocks(self, sequence: Sequence) -> int:
        """Blocks that it takes at its start, with its siblings, or by itself at its end, whichever are more; of one
        that may have several segments only those of the first."""
        if sequence.num_tokens > self.segment_tokens:
            return 0
        most = min(sequence.max_cached, self.segment_tokens)
        return max(self.blocks_for(sequence), self._workers.blocks_for(most))

    def _longest(self, sequence: Sequence) -> int:
        """The most tokens that ``sequence`` and its siblings can attend in one step on one R-worker that they need."""
        return min(sequence.max_cached, self.segment_tokens) * (1 + len(sequence.siblings))
