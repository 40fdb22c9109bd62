"""Forecast of the load: KV tokens that each R-worker will attend, and what it costs to place a sequence there.
The forecast is exact if output lengths are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastdecode.core.placing import UNLIMITED

SAMPLES, LEAST_SAMPLES, CELLS = 64, 16, 8192
"""Most and fewest steps of the forecast that are sampled to compare R-workers, and most samples over all R-workers."""


@dataclass(frozen=True)
class Newcomer:
    """A sequence before its first decode: ``num_prefill`` tokens, of which ``num_left`` must still be computed.
    ``decode_steps`` steps follow, for it and for ``num_siblings`` forked from it. ``attends``: its prompt chunks attend
    on the R-worker. ``expected_area``: KV tokens that each of these sequences is expected to attend, summed over its
    decode steps; None if lengths are known, so that the sum of ``num_prefill`` + k over steps k = 1, 2, ... is exact.
    ``base``: tokens in full segments; ``reads``: R-worker and tokens of each full segment. ``copy``: the R-worker of
    its second copy, which is expected to attend in half of the decode steps; -1 for none.
    """

    worker: int
    num_prefill: int
    num_left: int
    decode_steps: int
    num_siblings: int = 0
    attends: bool = False
    expected_area: float | None = None
    base: int = 0
    reads: tuple[tuple[int, int], ...] = ()
    copy: int = -1

    @property
    def holders(self) -> tuple[int, ...]:
        """The R-workers with a copy of the new sequence, which attend in its decode steps in turn."""
        return (self.worker,) if self.copy < 0 else (self.worker, self.copy)

    @property
    def kv_area(self) -> float:
        """KV tokens that the new sequence and its siblings attend, summed over all their decode steps."""
        steps = self.decode_steps
        known = self.num_prefill * steps + steps * (steps + 1) // 2
        return (1 + self.num_siblings) * (known if self.expected_area is None else self.expected_area)


@dataclass(frozen=True, eq=False)
class Meeting:
    """The load of each R-worker in the steps in which a new sequence would decode.
    ``known``: KV tokens attended without this sequence, float64 [num_workers, steps]; 0 after these steps. ``ramp``: KV
    tokens that the sequence attends in each step, float64 [at least as many steps].
    """

    known: np.ndarray
    ramp: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean load of each R-worker over the new sequence's steps, float64 [num_workers].
        A step's load includes half of the KV tokens that the sequence attends in it. Steps are weighted by these
        tokens.
        """
        num_known = self.known.shape[1]
        return (self.known @ self.ramp[:num_known] + (self.ramp @ self.ramp) / 2) / self.ramp.sum()

    @property
    def peaks(self) -> np.ndarray:
        """The most KV tokens that each R-worker would attend in a step with the new sequence; float64 [num_workers]."""
        num_known = self.known.shape[1]
        peaks = (self.known + self.ramp[:num_known]).max(axis=1, initial=0.0)
        return np.maximum(peaks, self.ramp[num_known:].max(initial=0.0))

    @property
    def most(self) -> float:
        """A number that none of ``peaks`` exceeds, which is faster to compute."""
        return float(self.known.max(initial=0.0) + self.ramp[-1])


class LoadForecast:
    """The KV tokens that each R-worker attends in the coming steps; step 0 is being planned.
    A sequence with c cached tokens attends c + 1 + t in step t. ``loads``: float64 [num_workers, horizon]. ``room``:
    rows that prompts may take in each step, float64 [horizon], which is the token budget less the decodes. Prompts take
    rows in the order in which they are added, as the scheduler's chunks do. When a sequence fills its last segment, the
    R-worker of the next one is unknown; the forecast divides this growth equally among all R-workers. If a sequence has
    two copies, each R-worker gets half of its load.
    """

    def __init__(
        self,
        workers: np.ndarray,
        cached: np.ndarray,
        decode_steps: np.ndarray,
        num_workers: int,
        token_budget: int,
        segment_tokens: int = UNLIMITED,
        closed: tuple[np.ndarray, np.ndarray] | None = None,
        seconds: np.ndarray | None = None,
    ) -> None:
        """Add the load of the decoding sequences.
        ``workers``, ``cached`` and ``decode_steps``, int64 [n], describe their last segments. ``closed``: R-workers and
        decode steps of their full segments, int64 [num_closed], of ``segment_tokens`` each. ``seconds``: R-workers of
        their second copies, int64 [n], -1 for none; None if no sequence has one.
        """
        horizon = int(decode_steps.max(initial=0)) + 1
        cells = (num_workers, horizon)
        place, weights = workers * horizon + decode_steps, np.ones(len(workers))
        attended = cached + 1.0
        if seconds is not None:
            place = np.concatenate([place, np.where(seconds >= 0, seconds, workers) * horizon + decode_steps])
            weights, attended = np.full(len(place), 0.5), np.tile(attended / 2, 2)
        num_ending = np.bincount(place, weights, num_workers * horizon).reshape(cells)
        cached_ending = np.bincount(place, attended, num_workers * horizon).reshape(cells)
        if closed is not None:
            held = closed[0] * horizon + closed[1]
            cached_ending = cached_ending + segment_tokens * np.bincount(held, minlength=cached_ending.size).reshape(
                cells
            )
        # in step t, only those sequences attend that end later
        attending = num_ending.sum(axis=1, keepdims=True) - np.cumsum(num_ending, axis=1)
        tokens = cached_ending.sum(axis=1, keepdims=True) - np.cumsum(cached_ending, axis=1)
        self.loads = (tokens + attending * np.arange(horizon)).astype(np.float64)
        self._segment_tokens = segment_tokens
        if (cached + decode_steps > segment_tokens).any():
            beyond = beyond_segments(workers, cached, decode_steps, segment_tokens, cells)
            self.loads += beyond.mean(axis=0) - beyond
        self._budget = token_budget
        self.room = token_budget - attending.sum(axis=0, dtype=np.float64)
        samples = min(max(CELLS // num_workers, LEAST_SAMPLES), SAMPLES)
        self._stride = max(1, horizon // samples)
        self._sampled = np.ascontiguousarray(self.loads[:, :: self._stride])

    @property
    def horizon(self) -> int:
        """The number of steps in the forecast. All known sequences have ended then."""
        return self.loads.shape[1]

    def first_decode(self, newcomer: Newcomer) -> int:
        """Return the first step in which ``newcomer`` decodes: the one after the step that completes its prompt."""
        if self.room[0] >= newcomer.num_left:
            return 1
        free = np.cumsum(np.maximum(self.room, 0))
        missing = newcomer.num_left - free[-1]
        if missing > 0:
            return self.horizon + int(-(-missing // self._budget))
        return int(np.searchsorted(free, newcomer.num_left)) + 1

    def peak_with(self, newcomer: Newcomer, worker: int) -> float:
        """Return the most KV tokens that R-worker ``worker`` attends in any step if it holds ``newcomer``."""
        return float(self._peaks_with(newcomer, self.loads[worker]))

    def peaks_with(self, newcomer: Newcomer) -> np.ndarray:
        """Return the most KV tokens that each R-worker attends in any step if it gets the first copy of ``newcomer``.
        The result is float64 [num_workers].
        """
        return self._peaks_with(newcomer, self.loads)

    def _peaks_with(self, newcomer: Newcomer, loads: np.ndarray) -> np.ndarray:
        start = self.first_decode(newcomer)
        ramp = self._ramp(newcomer)
        known = loads[..., start : start + newcomer.decode_steps]
        num_known = known.shape[-1]
        peaks = (known + ramp[:num_known]).max(axis=-1, initial=0.0)
        peaks = np.maximum(peaks, ramp[num_known:].max(initial=0.0))
        if newcomer.attends:
            in_tail = newcomer.num_prefill - newcomer.base
            peaks = np.maximum(peaks, loads[..., :start].max(axis=-1, initial=0.0) + in_tail)
        return peaks

    def met_by(self, newcomer: Newcomer) -> Meeting:
        """Return the load of each R-worker in the steps in which ``newcomer`` would decode.
        Only a sample of these steps is returned.
        """
        start = self.first_decode(newcomer)
        first, last = -(-start // self._stride), -(-(start + newcomer.decode_steps) // self._stride)
        steps = np.arange(first, max(last, first + 1)) * self._stride - start
        ramp = (newcomer.num_prefill + 1.0 + steps) * ((1 + newcomer.num_siblings) / len(newcomer.holders))
        return Meeting(self._sampled[:, first:last], ramp)

    def add(self, newcomer: Newcomer) -> None:
        """Add the load of ``newcomer`` to the forecast."""
        start = self.first_decode(newcomer)
        end = start + newcomer.decode_steps
        self._look_ahead(max(end, start))
        members = 1 + newcomer.num_siblings
        for worker, tokens in (*newcomer.reads, (newcomer.worker, newcomer.num_prefill - newcomer.base)):
            if newcomer.attends:
                self.loads[worker, :start] += tokens
        for worker, tokens in newcomer.reads:
            self.loads[worker, start:end] += tokens * members
        self._take_room(newcomer.num_left, start)
        for worker in newcomer.holders:
            self.loads[worker, start:end] += self._ramp(newcomer)
        if newcomer.num_prefill - newcomer.base + newcomer.decode_steps > self._segment_tokens:
            first = start + self._segment_tokens - (newcomer.num_prefill - newcomer.base)
            self.loads[:, first:end] += np.arange(1, end - first + 1) * members / len(self.loads)
        for worker in {*newcomer.holders, *(worker for worker, _ in newcomer.reads)}:
            self._sampled[worker] = self.loads[worker, :: self._stride]
        self.room[start:end] -= 1 + newcomer.num_siblings

    def _ramp(self, newcomer: Newcomer) -> np.ndarray:
        first = newcomer.num_prefill - newcomer.base + 1
        one = np.arange(first, first + newcomer.decode_steps, dtype=np.float64)
        return np.minimum(one, self._segment_tokens) * ((1 + newcomer.num_siblings) / len(newcomer.holders))

    def mean_loads(self, newcomer: Newcomer) -> np.ndarray:
        """Return each R-worker's mean load over the steps in which ``newcomer`` decodes: float64 [num_workers]."""
        start = self.first_decode(newcomer)
        steps = max(1, newcomer.decode_steps)
        return self.loads[:, start : start + steps].sum(axis=1) / steps

    def peaks(self, newcomer: Newcomer) -> np.ndarray:
        """Return each R-worker's highest load in any step until ``newcomer`` ends: float64 [num_workers]."""
        end = self.first_decode(newcomer) + newcomer.decode_steps
        return self.loads[:, :end].max(axis=1, initial=0.0)

    def _take_room(self, num_left: int, start: int) -> None:
        for step in range(start):
            taken = min(max(self.room[step], 0), num_left)
            self.room[step] -= taken
            num_left -= taken

    def _look_ahead(self, horizon: int) -> None:
        if horizon > self.horizon:
            more = horizon - self.horizon + SAMPLES  # extend it further than requested, so that the next calls need not
            self.loads = np.pad(self.loads, ((0, 0), (0, more)))
            self.room = np.pad(self.room, (0, more), constant_values=self._budget)
            self._sampled = np.ascontiguousarray(self.loads[:, :: self._stride])


def placement_costs(
    forecast: LoadForecast,
    newcomer: Newcomer,
    speeds: np.ndarray,
    capacities: np.ndarray,
    hit_tokens: Mapping[int, int],
    row_kv_tokens: float,
) -> np.ndarray:
    """Return the cost of ``newcomer`` on each R-worker: KV tokens per step, scaled to an R-worker of mean speed.
    The coming load counts, not the present one, since the newcomer stays for a whole output. An R-worker costs the time
    of the steps in which the newcomer will decode there, each weighted by the KV tokens that the newcomer attends in
    it. Placing each newcomer at the least cost keeps the sum of squares of all R-workers' times as low as a single
    choice can. This also keeps the busiest R-worker's time low. ``speeds``: float64 [num_workers], in any unit.
    ``capacities``: int64 [num_workers], tokens that their blocks hold; tokens beyond them would be preempted and
    recomputed. ``hit_tokens``: prompt tokens cached on each R-worker. Computing a row takes the S-worker as long as
    attending ``row_kv_tokens`` takes an R-worker of mean speed. The cost of rows is divided by the newcomer's steps.
    Returns float64 [num_workers].
    """
    relative = speeds / max(float(speeds.mean()), 1e-300)
    meeting = forecast.met_by(newcomer)
    costs = meeting.means / np.maximum(relative, 1e-300)
    per_step = row_kv_tokens / max(newcomer.decode_steps, 1)
    if meeting.most > capacities[capacities > 0].min(initial=np.iinfo(np.int64).max):
        costs += np.maximum(meeting.peaks - capacities, 0) * per_step
    for worker, tokens in hit_tokens.items():
        costs[worker] -= tokens * per_step
    return costs


def beyond_segments(
    workers: np.ndarray, cached: np.ndarray, decode_steps: np.ndarray, segment_tokens: int, shape: tuple[int, int]
) -> np.ndarray:
    """Return how many tokens will not fit the last segments of sequences: float64 [num_workers, horizon].
    Other R-workers will hold these tokens. ``workers``, ``cached`` (tokens in the last segment) and ``decode_steps``:
    int64 [n], for each sequence.
    """
    crossing = np.flatnonzero(cached + decode_steps > segment_tokens)
    if not len(crossing):
        return np.zeros(shape)
    first, last = segment_tokens - cached[crossing], decode_steps[crossing]
    rows, size = workers[crossing] * shape[1], shape[0] * shape[1]
    begun, done = (np.bincount(rows + step, minlength=size).reshape(shape) for step in (first, last))
    num_beyond = np.cumsum(begun - done, axis=1)
    ended = np.cumsum(np.bincount(rows + last, last - first, size).reshape(shape), axis=1)
    return np.cumsum(num_beyond, axis=1) - ended
