"""Moves of cached segments between R-workers: away from draining ones, to new ones, and for balance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.policy.load_forecast import LoadForecast
from fastdecode.scheduler.policy.move_prices import MovePrices, SharedPeak, TransferPrice, attended_in
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.holdings import Transfer
from fastdecode.scheduler.store.operations import Decision, Move, Refresh
from fastdecode.scheduler.store.store import Store

SOURCES, TARGETS, COMPARED = 3, 8, 64
"""Most R-workers with excess load, R-workers with little load, and sequences per source that are compared.
In larger pools, comparing more does not pay.
"""

COOL_DOWN = 64
"""Tokens that a sequence generates between two moves for balance."""


class Moves:
    """Between steps, moves sequences away from draining R-workers, to new R-workers, and between unevenly loaded ones.
    All three kinds use the forecast load. A draining R-worker must be emptied, a new one gets sequences until the load
    is even, and a move for balance must be worth its price (:class:`MovePrices`). Prompts stay where they are until
    they are computed.
    """

    def __init__(self, store: Store, admission: Admission, price: TransferPrice, corrects: bool) -> None:
        """``corrects``: True if moves for balance are allowed at all."""
        self._store, self._residents, self._table = store, store.residents, store.table
        self._admission, self._room, self._future = admission, admission.room, admission.future
        self._workers = store.workers
        self.prices = MovePrices(price, store.workers.speeds, corrects)
        self._joined: list[int] = []
        self._moved_at: dict[int, int] = {}
        self._correction: Transfer | None = None

    def even_out(self, worker: int) -> None:
        """From now on, move sequences to the new R-worker ``worker`` between steps, until the loads are even."""
        self._joined.append(worker)

    def next(self) -> Decision[Transfer | None]:
        """Return the next move; None if there is none.
        The target R-worker has the blocks for it once it has received its pending controls.
        """
        for sequence, held in self._leaving():
            if able := self._able(sequence, held):
                yield Refresh()
                target = self._admission.homes.cheapest(able, sequence)
                return (yield self._move(sequence, held, target))
        if self._joined:
            targets = [worker for worker in self._joined if worker in self._workers.accepting]
            yield Refresh()
            if targets and (move := self._evening_move(targets, None)):
                return (yield move)
            self._joined.clear()
        if not self.prices.may_pay:
            return None
        yield Refresh()
        correction = self._evening_move(self._workers.accepting, self.prices)
        self._correction = (yield correction) if correction else None
        self.prices.looked(self._correction is not None)
        return self._correction

    def moved(self, transfer: Transfer, seconds: float) -> None:
        """Record that the move ``transfer`` took ``seconds``."""
        self._moved_at[transfer.sequence.sequence_id] = len(transfer.sequence.output_token_ids)
        if transfer is self._correction:
            self.prices.corrected(seconds)

    def homeless(self) -> list[TokenSequence]:
        """Return sequences that must leave draining R-workers, but find no R-worker with enough free blocks now.
        Sequences that no other R-worker could ever hold are not included.
        """
        found = {
            sequence.sequence_id: sequence
            for sequence, held in self._leaving()
            if self._room.fits_elsewhere(sequence) and not self._able(sequence, held)
        }
        return list(found.values())

    def _leaving(self) -> Iterator[tuple[TokenSequence, Segment]]:
        """Yield (sequence, segment) for each segment that must leave a draining R-worker."""
        for worker in self._workers.draining:
            decoding = (each for each in self._residents.on(worker) if each.sequence_id in self._residents.decoding)
            yield from (
                (each, held)
                for each in decoding
                for held in each.segments
                if held.workers == [worker] and held.num_tokens
            )

    def _able(self, sequence: TokenSequence, held: Segment) -> list[int]:
        return [each for each in self._workers.accepting if self._room.to_move(sequence, held, each)]

    def _evening_move(self, targets: list[int], prices: MovePrices | None) -> Move | None:
        """Return the move to one of ``targets`` that saves most time beyond its price; None if no move does.
        Without ``prices``, moves cost nothing and savings count over the whole forecast.
        """
        forecast = self._future.forecast_anew()
        per_token = self.prices.seconds_per_token * self._workers.speeds.relative_times
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
        table = self._table
        for _, place, target in sorted(found, reverse=True):
            sequence = self._residents.decoding[int(table.chunks["sequence_id"][table.rows[place]])]
            if self._room.to_move(sequence, sequence.tail, target):
                return self._move(sequence, sequence.tail, target)
        return None

    def _options(
        self, source: int, targets: np.ndarray, forecast: LoadForecast, peak: SharedPeak, prices: MovePrices | None
    ) -> Iterator[tuple[float, int, int]]:
        """Yield each worthwhile move from R-worker ``source``: (seconds saved, index in ``table.rows``, target)."""
        table = self._table
        places = self._movable(source, prices.most_tokens if prices else np.inf)
        rows = table.rows[places]
        attended, left = table.tail_lens(rows) + 1.0, self._future.steps_left(rows)
        tokens = attended_in(peak.steps, attended, left)
        gains = peak.gains(source, tokens, targets)
        net = prices.worth(gains, attended) if prices else gains
        peaks = tokens[:, None] + forecast.loads[targets][None, :, peak.steps]
        fits = peaks.max(axis=2, initial=0.0) <= self._room.ceilings()[targets]
        for each, target in zip(*np.nonzero((net > 1e-9 * peak.times.max(initial=0.0)) & fits), strict=True):
            yield float(net[each, target]), int(places[each]), int(targets[target])

    def _movable(self, source: int, most_tokens: float) -> np.ndarray:
        """Return indices in ``table.rows`` of sequences on ``source`` that have not just moved, longest first."""
        table = self._table
        self._moved_at = {each: at for each, at in self._moved_at.items() if each in self._residents.decoding}
        on_source, num_tokens = table.homes[table.rows] == source, table.tail_lens(table.rows)
        places = np.flatnonzero(on_source & (num_tokens <= most_tokens) & (num_tokens > 0))
        rows = table.rows[places]
        ids, outputs = table.chunks["sequence_id"][rows].tolist(), table.num_outputs(rows).tolist()
        rested = [n - self._moved_at.get(i, -COOL_DOWN) >= COOL_DOWN for i, n in zip(ids, outputs, strict=True)]
        places = places[np.array(rested, bool)]
        return places[:: max(1, -(-len(places) // COMPARED))]

    def _move(self, sequence: TokenSequence, held: Segment, target: int) -> Move:
        return Move(sequence, held, target, self._admission.needs.elsewhere(sequence, held))
