"""How many blocks and tokens a sequence takes, in how many segments, and where these fit."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as PySequence

import numpy as np

from fastdecode.core.types import SPLIT_TOKENS
from fastdecode.scheduler.schedules import Limits, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.place import UNLIMITED, Segment, starts

LEAST_RANGE_TOKENS = 4096
"""Of ranges whose length is chosen freely."""


Size = tuple[int, int]
"""Blocks and tokens of a range."""


def pool_holds(sizes: PySequence[Size], capacities: np.ndarray) -> bool:
    """Whether ranges of ``sizes``, all alike but for one, fit ``capacities``, int64 [num_workers, 2], as ``sizes``."""
    other = max(sizes) if max(sizes) > sizes[0] else sizes[-1]
    return bool((slots_beside(np.array(other), np.array(sizes[0]), capacities) >= len(sizes) - 1).any())


def slots_beside(other: np.ndarray, whole: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return how many ranges of size ``whole`` the pool holds beside one of size ``other`` on each R-worker:
    [num_workers], -1 where that one does not fit.

    They do wherever they are put one after the other: what is left beside as many as fit is always the same. ``left``:
    [num_workers, as many as a size has].
    """
    slots, fits = (np.maximum(left, 0) // whole).min(axis=1), (left >= other).all(axis=1)
    beside = slots.sum() - slots + (np.maximum(left - other, 0) // whole).min(axis=1)
    return np.where(fits, beside, -1)


def place_ranges(
    sizes: Iterable[tuple[int, Size, int]],
    room: np.ndarray,
    capacities: np.ndarray,
    loads: np.ndarray,
    load_room: np.ndarray,
    speeds: np.ndarray,
) -> list[int] | None:
    """R-workers for ranges of ``sizes``, in order: blocks now, size in the end, KV tokens; None where one has none.

    Each goes where the coming load, with it, takes least time, among equals where most blocks are left; one that takes
    more blocks than the others, which are alike, goes first, where it leaves room for them. All arrays but
    ``speeds`` count what was placed: ``room``, int64 [num_workers], blocks that are left now, ``capacities``, int64
    [num_workers, 2], what is left for this sequence in the end; ``loads`` and ``load_room``, float64 [num_workers], KV
    tokens that will be attended, and that may be. ``speeds``, float64 [num_workers], are 0 where nothing may go.
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


def sizes_of(num_tokens: int, range_tokens: int, block_size: int) -> list[Size]:
    """Return the size of each range of a sequence of ``num_tokens``."""
    tokens = [min(range_tokens, num_tokens - start) for start in starts(num_tokens, range_tokens)]
    return [(-(-each // block_size), each) for each in tokens]


def choose_range_tokens(
    longest: int, num_blocks: PySequence[int], block_size: int, balanced_kv_tokens: int | None
) -> int | None:
    """Tokens of a range where the user leaves it open; None where every R-worker holds a longest sequence, and none is
    known to take one longer to read than the S-part takes; also where not even the smallest ranges fit the pool.

    ``balanced_kv_tokens``: what an R-worker attends in S time, if known.
    """
    if len(num_blocks) == 1:
        return None
    fits_one = -(-longest // block_size) <= min(num_blocks)
    range_tokens = LEAST_RANGE_TOKENS
    while range_tokens < (longest if balanced_kv_tokens is None else balanced_kv_tokens):
        range_tokens *= 2
    if fits_one:
        return range_tokens if range_tokens < longest and balanced_kv_tokens is not None else None
    while range_tokens > SPLIT_TOKENS and not fits_pool(longest, range_tokens, num_blocks, block_size):
        range_tokens //= 2
    return range_tokens if fits_pool(longest, range_tokens, num_blocks, block_size) else None


def fits_pool(longest: int, range_tokens: int, num_blocks: PySequence[int], block_size: int) -> bool:
    """Whether R-workers with ``num_blocks`` hold a sequence of ``longest`` tokens in ranges."""
    blocks = np.array(num_blocks)
    return pool_holds(sizes_of(longest, range_tokens, block_size), np.column_stack([blocks, blocks * block_size]))


class Needs:
    """Counts with the R-workers' own arithmetic. ``segment_tokens``: longer sequences have several segments."""

    def __init__(self, schedule: Schedule, limits: Limits) -> None:
        self.segment_tokens = limits.range_tokens
        self._block_size = limits.block_size
        self._reserved = limits.max_model_len if schedule.reserves_longest else 0

    @property
    def holds_all_from_start(self) -> bool:
        """True where a sequence never grows, since it begins with all blocks of the longest one."""
        return self._reserved > 0

    def at_start(self, sequence: Sequence) -> int:
        """Blocks that ``sequence`` holds from its start, its siblings' copies of a partial block included."""
        siblings = len(sequence.siblings)
        if self._reserved:
            return self._blocks_for(self._reserved) * (1 + siblings)
        num_tokens = sequence.num_tokens
        return self._blocks_for(num_tokens) + siblings * (num_tokens % self._block_size > 0)

    def at_most(self, sequence: Sequence) -> int:
        """Blocks that it takes at its start, with its siblings, or by itself at its end, whichever are more; of one
        that may have several segments only those of the first."""
        if sequence.num_tokens > self.segment_tokens:
            return 0
        most = min(sequence.max_cached, self.segment_tokens)
        return max(self.at_start(sequence), self._blocks_for(most))

    def attended(self, sequence: Sequence) -> int:
        """The most tokens that ``sequence`` and its siblings can attend in one step on one R-worker that they need."""
        return min(sequence.max_cached, self.segment_tokens) * (1 + len(sequence.siblings))

    def elsewhere(self, sequence: Sequence, moved: Segment) -> int:
        """Blocks that ``moved``, of ``sequence``, takes elsewhere, the one for the next token included."""
        if sequence.num_tokens <= self.segment_tokens:
            return self.at_start(sequence)
        return self._blocks_for(min(moved.num_tokens + 1, self.segment_tokens))

    def sizes_at_start(self, sequence: Sequence) -> list[Size]:
        """Blocks and tokens of each segment that ``sequence`` begins with, its siblings' copies of a partial block
        included."""
        *others, (blocks, tokens) = sizes_of(sequence.num_tokens, self.segment_tokens, self._block_size)
        return [*others, (blocks + len(sequence.siblings) * (tokens % self._block_size > 0), tokens)]

    def sizes_at_end(self, sequence: Sequence) -> list[Size]:
        """Blocks and tokens of each segment of ``sequence`` at its end."""
        return sizes_of(sequence.max_cached, self.segment_tokens, self._block_size)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
