"""How many blocks and tokens a sequence needs, in how many segments, and which R-workers have room for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fastdecode.core.placing import UNLIMITED, Size, sizes_of, slots_beside
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.schedules import Limits, Schedule
from fastdecode.scheduler.sequence import TokenSequence


def place_segments(
    sizes: Iterable[tuple[int, Size, int]],
    room: np.ndarray,
    capacities: np.ndarray,
    loads: np.ndarray,
    load_room: np.ndarray,
    speeds: np.ndarray,
) -> list[int] | None:
    """Return an R-worker for each segment of ``sizes``, in order; None if one does not fit.
    A size is the blocks needed now, the final blocks and tokens, and the KV tokens attended. Each segment goes where
    the coming load with it takes the least time; if times are equal, where most blocks are left. If one segment needs
    more blocks than every other, it is placed first, where it leaves room for the other segments. All arrays but
    ``speeds`` are updated. ``room``, int64 [num_workers]: free blocks. ``capacities``, int64 [num_workers, 2]: blocks
    and tokens that this sequence may have at its end. ``loads``, ``load_room``, float64 [num_workers]: KV tokens that
    will be attended, and that may be added. ``speeds``, float64 [num_workers]: 0 for R-workers to avoid.
    """
    listed = list(sizes)
    places = [-1] * len(listed)
    order = sorted(range(len(listed)), key=lambda index: -listed[index][0])
    for index in order:
        blocks, most, tokens = listed[index]
        able = (blocks <= room) & (np.array(most) <= capacities).all(axis=1) & (tokens <= load_room) & (speeds > 0)
        if len(order) > 1 and index == order[0] and blocks > listed[order[1]][0]:
            columns = np.column_stack([room, capacities, load_room.clip(max=UNLIMITED)]) * (speeds > 0)[:, None]
            one, whole = (np.array([size[0], *size[1], size[2]]) for size in (listed[index], listed[order[-1]]))
            able &= slots_beside(one, whole, columns) >= len(listed) - 1
        if not able.any():
            return None
        seconds = np.where(able, (loads + tokens) / np.where(able, speeds, 1.0), np.inf)
        best = np.flatnonzero(seconds == seconds.min())
        worker = int(best[np.argmax(room[best])])
        room[worker] -= blocks
        capacities[worker] -= most
        loads[worker] += tokens
        load_room[worker] -= tokens
        places[index] = worker
    return places


class Needs:
    """Counts the blocks that sequences need, as R-workers do. ``segment_tokens``: most tokens of a segment."""

    def __init__(self, schedule: Schedule, limits: Limits) -> None:
        self.segment_tokens = limits.placing.segment_tokens
        self._sizes = limits.sizes
        self._reserved = limits.max_model_len if schedule.reserves_longest else 0

    @property
    def holds_all_from_start(self) -> bool:
        """True if every sequence reserves blocks for the longest possible sequence when it starts."""
        return self._reserved > 0

    def at_start(self, sequence: TokenSequence) -> int:
        """Return the number of blocks that ``sequence`` takes at its start.
        Each sibling, another sample of the same prompt, copies the last block if this is partly full, and the state.
        """
        siblings = len(sequence.siblings)
        if self._reserved:
            return self._blocks_for(self._reserved) * (1 + siblings)
        num_tokens = sequence.num_tokens
        return self._blocks_for(num_tokens) + siblings * self._sizes.blocks_of_copy(num_tokens)

    def at_most(self, sequence: TokenSequence) -> int:
        """Return the most blocks that ``sequence`` ever takes: at its start with siblings, or alone at its end.
        If it may have several segments, only the first segment counts.
        """
        if sequence.num_tokens > self.segment_tokens:
            return 0
        most = min(sequence.max_cached, self.segment_tokens)
        return max(self.at_start(sequence), self._blocks_for(most))

    def attended(self, sequence: TokenSequence) -> int:
        """Return the most KV tokens that ``sequence`` and its siblings attend in one step on one R-worker."""
        return min(sequence.max_cached, self.segment_tokens) * (1 + len(sequence.siblings))

    def elsewhere(self, sequence: TokenSequence, moved: Segment) -> int:
        """Return how many blocks segment ``moved`` of ``sequence`` takes on another R-worker, with one more token."""
        if sequence.num_tokens <= self.segment_tokens:
            return self.at_start(sequence)
        return self._blocks_for(min(moved.num_tokens + 1, self.segment_tokens))

    def sizes_at_start(self, sequence: TokenSequence) -> list[Size]:
        """Return the blocks and tokens of each segment with which ``sequence`` starts.
        Blocks include the siblings' copies of a partly full last block and of states.
        """
        siblings, copied = len(sequence.siblings), self._sizes.blocks_of_copy
        return [(blocks + siblings * copied(tokens), tokens) for blocks, tokens in self._sizes_of(sequence.num_tokens)]

    def sizes_at_end(self, sequence: TokenSequence) -> list[Size]:
        """Return the blocks and tokens of each segment of ``sequence`` at its longest."""
        return self._sizes_of(sequence.max_cached)

    @property
    def of_new_tail(self) -> int:
        """The number of blocks that a new segment takes with its first token."""
        return self._blocks_for(1)

    def _sizes_of(self, num_tokens: int) -> list[Size]:
        return sizes_of(num_tokens, self.segment_tokens, self._sizes.block_size, self._sizes.fixed)

    def _blocks_for(self, num_tokens: int) -> int:
        return self._sizes.blocks_for(num_tokens)
