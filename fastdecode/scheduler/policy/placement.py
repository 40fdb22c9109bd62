"""Placement: the R-workers for a new sequence, for its second copy, and for a long sequence's segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fastdecode.core.placing import starts
from fastdecode.scheduler.places.place import UNNAMED, Copy, Segment
from fastdecode.scheduler.policy.future import Future
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer, placement_costs
from fastdecode.scheduler.policy.load_limit import LoadLimit
from fastdecode.scheduler.policy.needs import Needs, Size, place_segments
from fastdecode.scheduler.policy.room import Room
from fastdecode.scheduler.prefix.source import Hit
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store


class HomePlacement:
    """Places a sequence of one segment where the forecast load makes it cheapest."""

    def __init__(self, limits: Limits, store: Store, room: Room, future: Future, load_limit: LoadLimit) -> None:
        self.available = self.capacities = np.zeros(0, np.int64)
        self._limits, self._store, self._workers = limits, store, store.workers
        self._room, self._future, self._load_limit = room, future, load_limit
        self._speeds, self._num_present = np.zeros(0), 1

    def begin_step(self) -> None:
        """Record free blocks, capacities and speeds of all R-workers, once per step."""
        self.available = self._workers.available
        self.capacities = self._room.capacities()
        self._speeds, self._num_present = self._workers.speeds.lasting, max(1, len(self._workers.present))

    def costs(self, sequence: TokenSequence, newcomer: Newcomer, hits: dict[int, Hit]) -> np.ndarray:
        """Return the cost of ``sequence`` on each R-worker: float64 [num_workers]. ``newcomer``: the load that it adds.
        Draining R-workers cost infinity if the sequence could run elsewhere. If an earlier engine left cached tokens of
        the sequence, R-workers without them cost infinity too. If an R-worker has loaded the sequence's prefix from its
        disk, it costs least.
        """
        hit_tokens = {worker: hit.num_tokens for worker, hit in hits.items()}
        forecast = self._future.forecast()
        row_kv_tokens = self._row_kv_tokens(forecast)
        costs = placement_costs(forecast, newcomer, self._speeds, self.capacities, hit_tokens, row_kv_tokens)
        if sequence.woken_on in hits:
            costs[sequence.woken_on] = costs.min() - 1.0
        if any(hit.is_own for hit in hits.values()):
            costs[[worker for worker in range(len(costs)) if worker not in hits]] = np.inf
        if (draining := self._workers.draining) and self._room.fits_elsewhere(sequence):
            costs[draining] = np.inf
        return costs

    def best_first(
        self, sequence: TokenSequence, newcomer: Newcomer, hits: dict[int, Hit], costs: np.ndarray
    ) -> Iterator[int]:
        """Yield R-workers where ``sequence`` may start, cheapest first, without those of infinite cost.
        If costs are equal, the R-worker with most available blocks comes first. The first one may lack free blocks;
        later ones have them.
        """
        best = np.flatnonzero(costs == costs.min())
        # yielded alone, since callers nearly always take the first, and ordering all takes time
        yield int(best[np.argmax(self.available[best])])
        able = self._room.to_begin_where(sequence, self.available)
        able &= self._load_limit.fits_where(newcomer, self._future.forecast)
        able[list(hits)] = True
        order = np.lexsort((-self.available, costs))
        yield from order[(able & np.isfinite(costs))[order]].tolist()

    def cheapest(self, workers: list[int], sequence: TokenSequence) -> int:
        """Return the one of ``workers`` where the running ``sequence`` would cost least."""
        forecast, newcomer = self._future.forecast_anew(), self._future.going_on(sequence)
        costs = placement_costs(forecast, newcomer, self._workers.speeds.lasting, self._room.capacities(), {}, 1.0)
        return min(workers, key=lambda worker: costs[worker])

    def _row_kv_tokens(self, forecast: LoadForecast) -> float:
        """Return the KV tokens that an R-worker of mean speed attends while the S-worker computes a row.
        Before a measurement, S-worker and R-workers are taken to be equally busy, as in a pool of the right size.
        """
        limit = self._load_limit.known
        if limit is not None:
            return limit / self._limits.max_num_seqs / self._num_present
        return float(forecast.loads[:, 0].sum()) / max(1, len(self._store.residents)) / self._num_present


class SecondPlacement:
    """Places a second copy on another R-worker than the first, on another host if there is one.
    Of the cheapest R-workers it takes the one that holds fewest other sequences together with the first copy's
    R-worker. Then excess load of one R-worker can go to any other.
    """

    def __init__(self, limits: Limits, store: Store, needs: Needs, room: Room, future: Future) -> None:
        self.is_wanted = limits.placing.twice
        self._store, self._workers, self._table = store, store.workers, store.table
        self._needs, self._room, self._future = needs, room, future

    def beside(self, sequence: TokenSequence, home: int, hit: Hit | None, costs: np.ndarray) -> int | None:
        """Return the R-worker where the second copy of ``sequence`` starts; -1: no copy now; None: wait for blocks.
        A sequence that continues from a cached prefix starts with two copies if the prefix has two. Otherwise it gets
        its second copy once it decodes.
        """
        if not self.is_wanted:
            return -1
        if hit:
            twin = hit.source.twin(hit)
            if twin is None or self._workers[twin.prefix.worker].is_draining:
                return -1
            return twin.prefix.worker if self._room.to_begin(sequence, twin.prefix.worker, twin) else -1
        return self._choose(home, self._room.could_hold(sequence), self._needs.at_start(sequence), costs)

    def later(self, sequence: TokenSequence, segment: Segment) -> int:
        """Return the R-worker for a second copy of ``segment`` of the decoding ``sequence``.
        Return -1 if none has enough free blocks now.
        """
        met = self._future.forecast_anew().met_by(self._future.going_on(sequence))
        costs = met.means / np.maximum(self._workers.speeds.lasting, 1e-300)
        num_blocks = segment.num_blocks + (segment is sequence.tail)
        found = self._choose(segment.home, self._room.could_hold(sequence), num_blocks, costs)
        return -1 if found is None else found

    def _choose(self, home: int, could_hold: np.ndarray | bool, num_blocks: int, costs: np.ndarray) -> int | None:
        """Return the cheapest R-worker for a second copy; -1 if none could ever hold it, None if none can now.
        ``could_hold``: bool [num_workers]. ``num_blocks``: blocks that the copy takes now. ``costs``: float64
        [num_workers], from ``placement_costs``.
        """
        allowed = np.zeros(len(self._workers), bool)
        allowed[self._workers.accepting] = True
        allowed[home] = False
        allowed &= could_hold
        elsewhere = allowed & np.array([each.host != self._workers[home].host for each in self._workers])
        allowed = elsewhere if elsewhere.any() else allowed
        if not allowed.any():
            return -1
        able = np.flatnonzero(allowed & (num_blocks + self._workers.num_sequences <= self._workers.available))
        if not len(able):
            return None
        spread = float(np.ptp(costs[allowed]))
        # Fraction of the costs' range below which a difference of costs is ignored
        alike = 0.05
        best = able[costs[able] <= costs[able].min() + alike * spread]
        return int(best[np.argmin(self._shared_with(home)[best])])

    def _shared_with(self, home: int) -> np.ndarray:
        rows = self._table.rows
        homes, others = self._table.homes[rows], self._table.second_workers[rows]
        partners = np.concatenate([others[(homes == home) & (others >= 0)], homes[others == home]])
        return np.bincount(partners, minlength=len(self._workers))


class SegmentPlacement:
    """Places the segments of a long sequence where the forecast load takes the least time."""

    def __init__(
        self, limits: Limits, store: Store, needs: Needs, room: Room, future: Future, load_limit: LoadLimit
    ) -> None:
        self._twice = limits.placing.twice
        self._workers, self._needs = store.workers, needs
        self._room, self._future, self._load_limit = room, future, load_limit

    def to_begin(
        self, sequence: TokenSequence, hit: Hit | None, would_begin: Callable[[int, int], int | bool]
    ) -> tuple[Newcomer, list[Segment]] | None:
        """Return the load and the segments with which ``sequence`` starts; segments of ``hit`` stay on their R-workers.
        Return None if too few blocks are free, or if this step could compute none of its tokens.
        """
        alone = self._future.newcomer(sequence, 0, hit.num_tokens if hit else -1)
        if not would_begin(alone.num_left, alone.num_prefill - alone.num_left):
            return None
        segments = self._segments(sequence, alone, hit)
        return None if segments is None else (self._future.in_segments(alone, segments), segments)

    def _segments(self, sequence: TokenSequence, newcomer: Newcomer, hit: Hit | None) -> list[Segment] | None:
        most, needed = (
            self._needs.sizes_at_end(sequence),
            [blocks for blocks, _ in self._needs.sizes_at_start(sequence)],
        )
        room, capacities = self._workers.available - self._workers.num_sequences, self._room.alone(sequence)
        pieces = hit.source.pieces(sequence, hit) if hit else []
        for blocks, end, (count, prefix, *_) in zip(needed, most, pieces, strict=False):
            taken = sum(block.num_sequences == 0 for block in (*prefix.blocks[:count], *prefix.own))
            room[prefix.worker] -= blocks - count + taken
            capacities[prefix.worker] -= end
        places = [each.prefix.worker for each in pieces]
        if (room < 0)[places].any() or (capacities < 0).any():
            return None
        forecast = self._future.forecast()
        loads, load_room = forecast.mean_loads(newcomer), self._load_limit.ceilings - forecast.peaks(newcomer)
        sizes = list(zip(needed, most, self._tokens(sequence), strict=False))
        for worker, (_, _, tokens) in zip(places, sizes, strict=False):
            loads[worker] += tokens
            load_room[worker] -= tokens
        if (load_room < 0)[places].any():
            return None
        rest = place_segments(sizes[len(places) :], room, capacities, loads, load_room, self._speeds(sequence))
        if rest is None:
            return None
        each = zip(starts(sequence.num_tokens, self._needs.segment_tokens), needed, [*places, *rest], strict=True)
        segments = [Segment(UNNAMED, start, blocks, [worker]) for start, blocks, worker in each]
        for segment in segments[len(places) :] if self._twice else ():
            self._copy_too(segment, room)
        return segments

    def _copy_too(self, segment: Segment, room: np.ndarray) -> None:
        """Give ``segment`` a second copy if another R-worker has enough free blocks.
        ``room``, free blocks, int64 [num_workers], is updated. R-workers of other hosts come first, and of these the
        one with most blocks left. The copy is dropped when blocks run out (``SecondCopies.give_up``).
        """
        able = [each for each in self._workers.accepting if each != segment.home and room[each] > segment.num_blocks]
        host = self._workers[segment.home].host
        elsewhere = [each for each in able if self._workers[each].host != host]
        if able:
            worker = max(elsewhere or able, key=lambda each: int(room[each]))
            room[worker] -= segment.num_blocks
            segment.copies.append(Copy(worker))

    def next_tail(self, sequence: TokenSequence) -> tuple[int, bool]:
        """Return the R-worker for the next segment of the decoding ``sequence``, whose last one is full; -1 for none.
        The second result says whether a block is available there.
        """
        loads = self._future.forecast_anew().mean_loads(self._future.going_on(sequence))
        most = self._needs.sizes_at_end(sequence)[sequence.num_closed + 1]
        capacities = self._room.left_for(sequence)
        speeds, endless = self._speeds(sequence, capacities, most), np.full(len(self._workers), np.inf)
        first = self._needs.of_new_tail
        for spare in (self._workers.num_sequences, 0):
            room = self._workers.available - spare
            if found := place_segments([(first, most, 0)], room, capacities.copy(), loads, endless, speeds):
                return found[0], True
        found = place_segments([(0, most, 0)], capacities[:, 0].copy(), capacities, loads, endless, speeds)
        return (found or [-1])[0], False

    def again(self, sequence: TokenSequence) -> list[tuple[Segment, int]] | None:
        """Return a new R-worker for each lost segment of ``sequence``; None if too few blocks are free."""
        loads = self._future.forecast_anew().mean_loads(self._future.going_on(sequence))
        lost = [each for each in sequence.segments if each.home < 0]
        most, length = self._needs.sizes_at_end(sequence), self._needs.segment_tokens
        sizes = [(each.num_blocks, most[each.start // length], length) for each in lost]
        room, limits = self._workers.available - self._workers.num_sequences, self._load_limit.ceilings
        places = place_segments(sizes, room, self._room.left_for(sequence), loads, limits, self._speeds(sequence))
        return None if places is None else list(zip(lost, places, strict=True))

    def _speeds(self, sequence: TokenSequence, capacities: np.ndarray | None = None, most: Size = (0, 0)) -> np.ndarray:
        """Return the R-workers' speeds, 0 for lost R-workers and, if possible, for draining ones.
        A draining R-worker is used only if no other R-worker has room for the sequence. With ``capacities``, room for a
        segment of size ``most`` is enough.
        """
        speeds, accepting = self._workers.speeds.lasting.copy(), np.zeros(len(self._workers), bool)
        accepting[self._workers.accepting] = True
        if capacities is None:
            enough = self._room.fits_elsewhere(sequence)
        else:
            enough = bool((capacities[accepting] >= np.array(most)).all(axis=1).any())
        allowed = accepting if enough else np.array([not worker.is_gone for worker in self._workers])
        speeds[~allowed] = 0.0
        return speeds

    def _tokens(self, sequence: TokenSequence) -> list[int]:
        length, members, num_tokens = self._needs.segment_tokens, 1 + len(sequence.siblings), sequence.num_tokens
        return [members * min(length, num_tokens - start) for start in starts(num_tokens, length)]
