"""How many blocks and tokens a sequence takes, in how many segments, and where these fit."""

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
    """Return R-workers for ranges of ``sizes``, in order: blocks now, size in the end, KV tokens; None if one has none.

    Each goes where the coming load, with it, takes least time, among equals where most blocks are left; one that takes
    more blocks than the others, which are alike, goes first, where it leaves room for them. All arrays but ``speeds``
    count what was placed: ``room``, int64 [num_workers], blocks that are left now, ``capacities``, int64 [num_workers,
    2], what is left for this sequence in the end; ``loads`` and ``load_room``, float64 [num_workers], KV tokens that
    will be attended, and that may be. ``speeds``, float64 [num_workers], are 0 if nothing may go.
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
    """Counts with the R-workers' own arithmetic. ``segment_tokens``: longer sequences have several segments."""

    def __init__(self, schedule: Schedule, limits: Limits) -> None:
        self.segment_tokens = limits.placing.segment_tokens
        self._sizes, self._block_size = limits.sizes, limits.block_size
        self._reserved = limits.max_model_len if schedule.reserves_longest else 0

    @property
    def holds_all_from_start(self) -> bool:
        """True if a sequence never grows, since it begins with all blocks of the longest one."""
        return self._reserved > 0

    def at_start(self, sequence: TokenSequence) -> int:
        """Blocks that ``sequence`` holds from its start, its siblings' copies of a partial block and of a
        state included."""
        siblings = len(sequence.siblings)
        if self._reserved:
            return self._blocks_for(self._reserved) * (1 + siblings)
        num_tokens = sequence.num_tokens
        return self._blocks_for(num_tokens) + siblings * self._sizes.blocks_of_copy(num_tokens)

    def at_most(self, sequence: TokenSequence) -> int:
        """Blocks that it takes at its start, with its siblings, or by itself at its end, whichever are more; of one
        that may have several segments only those of the first."""
        if sequence.num_tokens > self.segment_tokens:
            return 0
        most = min(sequence.max_cached, self.segment_tokens)
        return max(self.at_start(sequence), self._blocks_for(most))

    def attended(self, sequence: TokenSequence) -> int:
        """The most tokens that ``sequence`` and its siblings can attend in one step on one R-worker that they need."""
        return min(sequence.max_cached, self.segment_tokens) * (1 + len(sequence.siblings))

    def elsewhere(self, sequence: TokenSequence, moved: Segment) -> int:
        """Return blocks that ``moved``, of ``sequence``, takes elsewhere, the one for the next token included."""
        if sequence.num_tokens <= self.segment_tokens:
            return self.at_start(sequence)
        return self._blocks_for(min(moved.num_tokens + 1, self.segment_tokens))

    def sizes_at_start(self, sequence: TokenSequence) -> list[Size]:
        """Blocks and tokens of each segment that ``sequence`` begins with, its siblings' copies of a partial block
        included."""
        *others, (blocks, tokens) = sizes_of(sequence.num_tokens, self.segment_tokens, self._block_size)
        return [*others, (blocks + len(sequence.siblings) * (tokens % self._block_size > 0), tokens)]

    def sizes_at_end(self, sequence: TokenSequence) -> list[Size]:
        """Return blocks and tokens of each segment of ``sequence`` at its end."""
        return sizes_of(sequence.max_cached, self.segment_tokens, self._block_size)

    def _blocks_for(self, num_tokens: int) -> int:
        return self._sizes.blocks_for(num_tokens)
