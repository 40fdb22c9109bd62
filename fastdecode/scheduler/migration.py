"""Which sequences go from one R-worker to another, cache and all."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as PySequence
from dataclasses import dataclass

import numpy as np

from fastdecode.scheduler.admission import Admission
from fastdecode.scheduler.load_forecast import LoadForecast, Newcomer, placement_costs
from fastdecode.scheduler.move_prices import MovePrices, SharedPeak, attended_in
from fastdecode.scheduler.ranges import Range
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.sequence import Sequence
from fastdecode.step import ScheduledStep

SOURCES, TARGETS, COMPARED = 3, 8, 64
"""R-workers with most to lose, R-workers with least to do, and sequences of a source that are compared: larger pools
have more of each than it pays to look at."""

COOL_DOWN = 64
"""Tokens that a sequence gets before it moves again."""


@dataclass(frozen=True)
class Move:
    """``num_tokens`` cached tokens of ``sequence``, which decodes, go from ``source`` to ``num_blocks`` blocks of
    ``target``: all, or those of a range. Both R-workers call them ``cache_id``.
    ``keeps_source``: it is a piece of a second copy, from token ``start`` on."""

    sequence: Sequence
    num_tokens: int
    target: int
    num_blocks: int
    source: int
    cache_id: int
    keeps_source: bool = False
    start: int = 0


class Migration:
    """Between steps: what is on an R-worker that drains leaves it, a newcomer gets its part of the load, and where the
    load turned out uneven sequences move if that wins more time than it takes.

    All three look at the load that is coming. Draining must be; a newcomer is given whatever evens the load; a
    correction has its price (:class:`MovePrices`). Prompts stay where they are until they are computed.
    """

    def __init__(self, residents: Residents, admission: Admission, seconds_per_moved_token: float) -> None:
        self._residents = residents
        self._admission = admission
        self._workers = residents.workers
        self._prices = MovePrices(seconds_per_moved_token)
        self._joined: list[int] = []
        self._moved_at: dict[int, int] = {}
        self._correction: Move | None = None

    def even_out(self, worker: int) -> None:
        """From here on, until the loads are even, sequences move to ``worker``, which joined."""
        self._joined.append(worker)

    def observe(self, step: ScheduledStep, s_seconds: float, wait_seconds: float, r_seconds: PySequence[float]) -> None:
        """One step: the S-worker's seconds, those it waited, and busy seconds of each R-worker."""
        work = np.array(step.kv_loads) * self._workers.relative_times
        self._prices.observe(work, s_seconds, wait_seconds, np.array(r_seconds))
        self._prices.note_newcomers(step.num_starts, step.num_prompt_rows)

    def next(self) -> Move | None:
        """What to move next; the blocks for it are free, once the target has heard its controls."""
        for sequence, held in self._leaving():
            if able := self._able(sequence, held):
                return self._move(sequence, held, self._best_of(able, sequence))
        if self._joined:
            targets = [worker for worker in self._joined if worker in self._workers.accepting]
            if targets and (move := self._evening_move(targets, None)):
                return move
            self._joined.clear()
        if not self._prices.may_pay:
            return None
        self._correction = self._evening_move(self._workers.accepting, self._prices)
        self._prices.looked(self._correction is not None)
        return self._correction

    def moved(self, move: Move, seconds: float) -> None:
        """It took ``seconds``."""
        self._moved_at[move.sequence.sequence_id] = len(move.sequence.output_token_ids)
        self._residents.move(move.sequence, move.cache_id, move.target, move.num_blocks)
        self._prices.paid(move.num_tokens, seconds, is_correction=move is self._correction)

    def homeless(self) -> list[Sequence]:
        """Those on R-workers that drain that could run elsewhere, but for which no R-worker has room now."""
        found = {
            sequence.sequence_id: sequence
            for sequence, held in self._leaving()
            if self._admission.fits_elsewhere(sequence) and not self._able(sequence, held)
        }
        return list(found.values())

    def _leaving(self) -> Iterator[tuple[Sequence, Range]]:
        """What is to leave the R-workers that drain, and whose it is."""
        for worker in self._workers.draining:
            decoding = (each for each in self._residents.on(worker) if each.sequence_id in self._residents.decoding)
            yield from (
                (each, held) for each in decoding for held in each.ranges if held.worker == worker and held.num_tokens
            )

    def _able(self, sequence: Sequence, held: Range) -> list[int]:
        return [each for each in self._workers.accepting if self._admission.has_room_to_move(sequence, held, each)]

    def _best_of(self, workers: list[int], sequence: Sequence) -> int:
        """Where ``sequence`` will meet least, as if it started there."""
        forecast = self._admission.forecast_anew()
        left = int(self._admission.steps_left(np.array([sequence.row]))[0])
        newcomer = Newcomer(0, sequence.num_tokens - 1, 0, left)
        costs = placement_costs(forecast, newcomer, self._workers.speeds, self._admission.capacities(), {}, 1.0)
        return min(workers, key=lambda worker: costs[worker])

    def _evening_move(self, targets: list[int], prices: MovePrices | None) -> Move | None:
        """What wins most above its price, if anything does; over all that is known to come where it has no price."""
        forecast = self._admission.forecast_anew()
        per_token = self._prices.seconds_per_token * self._workers.relative_times
        peak = SharedPeak(forecast.loads, per_token, 0.0)
        if prices:
            lacking = np.maximum(peak.times[:, 0].mean() - peak.times[:, 0], 0.0) / per_token
            num_steps = prices.steps_to_bring(float(lacking.sum()))
            peak = SharedPeak(forecast.loads[:, :num_steps], per_token, prices.hidden)
        means = peak.times.mean(axis=1)
        best = np.array(sorted(targets, key=lambda worker: means[worker])[:TARGETS], np.int64)
        excess = peak.excess()
        sources = sorted(self._workers.accepting, key=lambda worker: -excess[worker])[:SOURCES]
        found = [
            option
            for source in sources
            if excess[source] > 0
            for option in self._options(source, best[best != source], forecast, peak, prices)
        ]
        table = self._residents.table
        for _, place, target in sorted(found, reverse=True):
            sequence = self._residents.decoding[int(table.chunks["sequence_id"][table.rows[place]])]
            if self._admission.has_room_to_move(sequence, sequence.tail, target):
                return self._move(sequence, sequence.tail, target)
        return None

    def _options(
        self, source: int, targets: np.ndarray, forecast: LoadForecast, peak: SharedPeak, prices: MovePrices | None
    ) -> Iterator[tuple[float, int, int]]:
        """Of each move from ``source`` that is worth it: seconds above its price, place in ``table.rows``, target."""
        table = self._residents.table
        places = self._movable(source, prices.most_tokens if prices else np.inf)
        rows = table.rows[places]
        attended, left = table.tail_lens(rows) + 1.0, self._admission.steps_left(rows)
        tokens = attended_in(peak.steps, attended, left)
        gains = peak.gains(source, tokens, targets)
        net = gains - 2 * (prices.per_token if prices else 0.0) * attended[:, None]
        peaks = tokens[:, None] + forecast.loads[targets][None, :, peak.steps]
        fits = peaks.max(axis=2, initial=0.0) <= self._admission.ceilings()[targets]
        for each, target in zip(*np.nonzero((net > 1e-9 * peak.times.max(initial=0.0)) & fits), strict=True):
            yield float(net[each, target]), int(places[each]), int(targets[target])

    def _movable(self, source: int, most_tokens: float) -> np.ndarray:
        """Places in ``table.rows`` of the sequences on ``source`` that have not just moved, longest first."""
        table = self._residents.table
        self._moved_at = {each: at for each, at in self._moved_at.items() if each in self._residents.decoding}
        on_source, num_tokens = table.workers[table.rows] == source, table.tail_lens(table.rows)
        places = np.flatnonzero(on_source & (num_tokens <= most_tokens) & (num_tokens > 0))
        rows = table.rows[places]
        ids, outputs = table.chunks["sequence_id"][rows].tolist(), table.num_outputs(rows).tolist()
        rested = [n - self._moved_at.get(i, -COOL_DOWN) >= COOL_DOWN for i, n in zip(ids, outputs, strict=True)]
        places = places[np.array(rested, bool)]
        return places[:: max(1, -(-len(places) // COMPARED))]

    def _move(self, sequence: Sequence, held: Range, target: int) -> Move:
        num_blocks = self._admission.blocks_to_move(sequence, held)
        self._residents.prefix_cache.make_room(target, num_blocks)
        return Move(sequence, held.num_tokens, target, num_blocks, held.worker, held.cache_id)
