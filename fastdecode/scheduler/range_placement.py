"""Where the ranges of a long sequence go: at its start, when its tail is whole, and when some were lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fastdecode.errors import RequestError
from fastdecode.scheduler.load_forecast import LoadForecast, Newcomer
from fastdecode.scheduler.prefix import PrefixCache
from fastdecode.scheduler.ranges import UNLIMITED, Range, Size, place_ranges, pool_holds, sizes_of, starts
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.worker_state import Chain, Workers


class RangePlacement:
    """A range goes where the coming load takes least time. A sequence has no more of them on an R-worker than it could
    fill there were it alone, so that the oldest can always go on.

    ``load_limits``: KV tokens that each R-worker may attend, float64 [num_workers]; infinite where nothing limits them.
    """

    def __init__(
        self,
        workers: Workers,
        prefix_cache: PrefixCache,
        range_tokens: int,
        load_limits: Callable[[], np.ndarray],
        forecast: Callable[[], LoadForecast],
    ) -> None:
        self.range_tokens = range_tokens
        self._workers = workers
        self._prefix_cache = prefix_cache
        self._load_limits = load_limits
        self._forecast = forecast

    def sizes_at_end(self, sequence: Sequence) -> list[Size]:
        """Of each range of ``sequence``."""
        return sizes_of(sequence.max_cached, self.range_tokens, self._workers.block_size)

    def sizes_at_start(self, sequence: Sequence) -> list[Size]:
        """Of each range that ``sequence`` begins with, its siblings' copies of a partial block included."""
        *others, (blocks, tokens) = sizes_of(sequence.num_tokens, self.range_tokens, self._workers.block_size)
        return [*others, (blocks + len(sequence.siblings) * (tokens % self._workers.block_size > 0), tokens)]

    def could_hold(self, sequence: Sequence, among: list[int]) -> bool:
        """Whether the R-workers ``among`` could run ``sequence`` to its end by themselves, and begin its siblings."""
        capacities = self._capacities(sequence)[among]
        sizes = (self.sizes_at_start(sequence), self.sizes_at_end(sequence))
        return all(pool_holds(each, capacities) for each in sizes)

    def check(self, sequence: Sequence) -> None:
        """RequestError when the pool could never run ``sequence``, which may have several ranges."""
        if self.could_hold(sequence, self._workers.present):
            return
        sizes, whole = self.sizes_at_end(sequence), (self._workers.blocks_for(self.range_tokens), self.range_tokens)
        slots = (self._capacities(sequence)[self._workers.present] // np.array(whole)).min(axis=1).sum()
        raise RequestError(
            f"the request needs {len(sizes)} ranges of {self.range_tokens} tokens, and within kv_load_limit and their "
            f"KV blocks the R-workers have room for {slots}: lower n or max_tokens, or give more kv_cache_memory or a "
            f"higher kv_load_limit"
        )

    def ranges(self, sequence: Sequence, newcomer: Newcomer, hit: tuple[int, Chain] | None) -> list[Range] | None:
        """All ranges that ``sequence`` begins with, ``hit``'s where they are; None where there is no room."""
        most, needed = self.sizes_at_end(sequence), [blocks for blocks, _ in self.sizes_at_start(sequence)]
        room, capacities = self._workers.available - self._workers.num_sequences, self._capacities(sequence)
        pieces = self._prefix_cache.pieces(sequence, hit) if hit else []
        for blocks, end, (count, chain) in zip(needed, most, pieces, strict=False):
            taken = sum(block.num_sequences == 0 for block in chain.blocks[:count])
            room[chain.worker] -= blocks - count + taken
            capacities[chain.worker] -= end
        if (room < 0)[[chain.worker for _, chain in pieces]].any() or (capacities < 0).any():
            return None
        places = [chain.worker for _, chain in pieces]
        loads, load_room = self._forecast().mean_loads(newcomer), self._load_limits() - self._forecast().peaks(newcomer)
        sizes = list(zip(needed, most, self._tokens(sequence), strict=False))
        for worker, (_, _, tokens) in zip(places, sizes, strict=False):
            loads[worker] += tokens
            load_room[worker] -= tokens
        if (load_room < 0)[places].any():
            return None
        rest_of = place_ranges(sizes[len(places) :], room, capacities, loads, load_room, self._speeds(sequence))
        if rest_of is None:
            return None
        first = sequence.sequence_id
        ids = [first, *(self._prefix_cache.new_id() for _ in needed[1:])]
        starting = starts(sequence.num_tokens, self.range_tokens)
        ranges = zip(ids, [*places, *rest_of], starting, needed, strict=True)
        return [Range(each, worker, start, 0, blocks) for each, worker, start, blocks in ranges]

    def next_tail(self, sequence: Sequence, newcomer: Newcomer) -> tuple[int, bool]:
        """Where ``sequence``, whose tail is whole, goes on, and whether there is a block for it now."""
        most = self.sizes_at_end(sequence)[len(sequence.closed) + 1]
        capacities = self._left_for(sequence)
        loads, speeds = self._forecast().mean_loads(newcomer), self._speeds(sequence, capacities, most)
        endless = np.full(len(self._workers), np.inf)
        for spare in (self._workers.num_sequences, 0):
            room = self._workers.available - spare
            if found := place_ranges([(1, most, 0)], room, capacities.copy(), loads, endless, speeds):
                return found[0], True
        found = place_ranges([(0, most, 0)], capacities[:, 0].copy(), capacities, loads, endless, speeds)
        return (found or [-1])[0], False

    def again(self, sequence: Sequence, newcomer: Newcomer) -> list[tuple[Range, int]] | None:
        """Places for the ranges of ``sequence`` that were lost; None where there is no room."""
        lost = [each for each in sequence.ranges if each.worker < 0]
        most = self.sizes_at_end(sequence)
        sizes = [(each.num_blocks, most[each.start // self.range_tokens], self.range_tokens) for each in lost]
        room = self._workers.available - self._workers.num_sequences
        limits, loads = self._load_limits(), self._forecast().mean_loads(newcomer)
        places = place_ranges(sizes, room, self._left_for(sequence), loads, limits, self._speeds(sequence))
        return None if places is None else list(zip(lost, places, strict=True))

    def has_room_to_move(self, sequence: Sequence, moved: Range, index: int) -> bool:
        """Whether ``moved``, of ``sequence``, could go on on R-worker ``index`` without a preemption there."""
        worker, most = self._workers[index], self.sizes_at_end(sequence)[moved.start // self.range_tokens]
        fits = (np.array(most) <= self._left_for(sequence)[index]).all()
        return bool(fits) and self.blocks_to_move(moved) + worker.num_sequences <= worker.available

    def blocks_to_move(self, moved: Range) -> int:
        """Blocks that ``moved`` takes elsewhere, the one for the next token included."""
        return self._workers.blocks_for(min(moved.num_tokens + 1, self.range_tokens))

    def _left_for(self, sequence: Sequence) -> np.ndarray:
        """What the ranges of ``sequence`` leave to it of ``_capacities``."""
        capacities, most = self._capacities(sequence), self.sizes_at_end(sequence)
        for each, size in zip(sequence.ranges, most, strict=False):
            if each.worker >= 0:
                capacities[each.worker] -= size
        return capacities

    def _capacities(self, sequence: Sequence) -> np.ndarray:
        """Blocks and tokens that ``sequence``, alone, could have on each R-worker: int64 [num_workers, 2]."""
        tokens = np.minimum(self._load_limits(), UNLIMITED) // (1 + len(sequence.siblings))
        return np.column_stack([self._workers.num_blocks, tokens.astype(np.int64)])

    def _speeds(self, sequence: Sequence, capacities: np.ndarray | None = None, most: Size = (0, 0)) -> np.ndarray:
        """0 for R-workers that are not to take ranges: those that drain, unless no others could."""
        speeds, accepting = self._workers.speeds.copy(), np.zeros(len(self._workers), bool)
        accepting[self._workers.accepting] = True
        if capacities is None:
            enough = self.could_hold(sequence, self._workers.accepting)
        else:
            enough = bool((capacities[accepting] >= np.array(most)).all(axis=1).any())
        allowed = accepting if enough else np.array([not worker.is_gone for worker in self._workers])
        speeds[~allowed] = 0.0
        return speeds

    def _tokens(self, sequence: Sequence) -> list[int]:
        """KV tokens that each range, with which ``sequence`` begins, and its siblings will have attended."""
        length, members, num_tokens = self.range_tokens, 1 + len(sequence.siblings), sequence.num_tokens
        return [members * min(length, num_tokens - start) for start in starts(num_tokens, length)]
