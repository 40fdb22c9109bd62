"""The load that is coming: KV tokens that each R-worker will attend, exact where output lengths are known; and what a
placement costs by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastdecode.core.placing import UNLIMITED

SAMPLES, LEAST_SAMPLES, CELLS = 64, 16, 8192
"""Steps of the horizon, evenly spread, at which R-workers are compared: fewer where there are more R-workers than
these cells have room for."""


@dataclass(frozen=True)
class Newcomer:
    """A sequence that is not decoding yet: ``num_prefill`` tokens, ``num_left`` of them to compute.

    ``decode_steps`` steps follow, of it and of ``num_siblings`` forked from it. ``attends``: its prompt's chunks
    attend on the R-worker. ``expected_area``: KV tokens that each of them attends over its life, where lengths are
    only expected; None: Σ (p + k) over its decode steps k. ``base`` of its tokens are in closed ranges: ``reads`` has
    the R-worker and tokens of each. ``copy``: the R-worker with its second copy, which is expected to attend half of
    its decode steps; -1: none.
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
        """The R-workers that share its decode steps."""
        return (self.worker,) if self.copy < 0 else (self.worker, self.copy)

    @property
    def kv_area(self) -> float:
        """KV tokens that it and its siblings attend over their lives."""
        steps = self.decode_steps
        known = self.num_prefill * steps + steps * (steps + 1) // 2
        return (1 + self.num_siblings) * (known if self.expected_area is None else self.expected_area)


@dataclass(frozen=True, eq=False)
class Meeting:
    """``known``: load of each R-worker, float64 [num_workers, steps]; beyond it there is none. ``ramp``: what a new
    sequence attends, float64 [at least as many steps]."""

    known: np.ndarray
    ramp: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean load of each R-worker over the new sequence's steps, each weighted by what it attends then, with half
        of that; float64 [num_workers]."""
        num_known = self.known.shape[1]
        return (self.known @ self.ramp[:num_known] + (self.ramp @ self.ramp) / 2) / self.ramp.sum()

    @property
    def peaks(self) -> np.ndarray:
        """The most that each would attend, the new sequence included; float64 [num_workers]."""
        num_known = self.known.shape[1]
        peaks = (self.known + self.ramp[:num_known]).max(axis=1, initial=0.0)
        return np.maximum(peaks, self.ramp[num_known:].max(initial=0.0))

    @property
    def most(self) -> float:
        """At least as much as any of ``peaks``."""
        return float(self.known.max(initial=0.0) + self.ramp[-1])


class LoadForecast:
    """Step 0 is the one being planned. A sequence with c cached tokens attends c + 1 + t of them in step t.

    ``loads``: float64 [num_workers, horizon]. ``room``: rows of each step that prompts may take, float64 [horizon]:
    the token budget less the decodes. Prompts take it in the order in which they are added, as the scheduler's
    chunks do. A tail that reaches the end of its range grows no more; it is not known where its sequence grows then, so
    all R-workers take a part of that. Of a sequence with two copies each holder counts half.
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
        """``workers``, ``cached`` and ``decode_steps``, int64 [n], are of the sequences that decode, or their tails.

        ``closed``: of their closed ranges, of ``segment_tokens`` each, R-workers and decode steps, int64 [num_closed].
        ``seconds``: R-workers of their second copies, int64 [n], -1 if there is none; None: nowhere is one.
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
        # In step t attend those with more than t steps to go: sums over later ends.
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
        """Steps looked ahead; no sequence known of runs longer."""
        return self.loads.shape[1]

    def first_decode(self, newcomer: Newcomer) -> int:
        """Return the step after the one that computes the prompt's last token."""
        if self.room[0] >= newcomer.num_left:
            return 1
        free = np.cumsum(np.maximum(self.room, 0))
        missing = newcomer.num_left - free[-1]
        if missing > 0:
            return self.horizon + int(-(-missing // self._budget))
        return int(np.searchsorted(free, newcomer.num_left)) + 1

    def peak_with(self, newcomer: Newcomer, worker: int) -> float:
        """The most that ``worker``, a holder of the newcomer, attends in any step in which the new sequence runs."""
        return float(self._peaks_with(newcomer, self.loads[worker]))

    def peaks_with(self, newcomer: Newcomer) -> np.ndarray:
        """Return the same for every R-worker, were the newcomer there: float64 [num_workers]."""
        return self._peaks_with(newcomer, self.loads)

    def _peaks_with(self, newcomer: Newcomer, loads: np.ndarray) -> np.ndarray:
        """Over the last axis of ``loads``."""
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
        """Return what the new sequence would meet on each R-worker, in sampled steps that stand for all of its own."""
        start = self.first_decode(newcomer)
        first, last = -(-start // self._stride), -(-(start + newcomer.decode_steps) // self._stride)
        steps = np.arange(first, max(last, first + 1)) * self._stride - start
        ramp = (newcomer.num_prefill + 1.0 + steps) * ((1 + newcomer.num_siblings) / len(newcomer.holders))
        return Meeting(self._sampled[:, first:last], ramp)

    def add(self, newcomer: Newcomer) -> None:
        """From here on ``newcomer`` is counted."""
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
        """Return what the new sequences attend from their first decode on, on each of their holders."""
        first = newcomer.num_prefill - newcomer.base + 1
        one = np.arange(first, first + newcomer.decode_steps, dtype=np.float64)
        return np.minimum(one, self._segment_tokens) * ((1 + newcomer.num_siblings) / len(newcomer.holders))

    def mean_loads(self, newcomer: Newcomer) -> np.ndarray:
        """Of each R-worker in the steps in which ``newcomer`` decodes: float64 [num_workers]."""
        start = self.first_decode(newcomer)
        steps = max(1, newcomer.decode_steps)
        return self.loads[:, start : start + steps].sum(axis=1) / steps

    def peaks(self, newcomer: Newcomer) -> np.ndarray:
        """Of each R-worker until ``newcomer`` ends: float64 [num_workers]."""
        end = self.first_decode(newcomer) + newcomer.decode_steps
        return self.loads[:, :end].max(axis=1, initial=0.0)

    def _take_room(self, num_left: int, start: int) -> None:
        for step in range(start):
            taken = min(max(self.room[step], 0), num_left)
            self.room[step] -= taken
            num_left -= taken

    def _look_ahead(self, horizon: int) -> None:
        if horizon > self.horizon:
            more = horizon - self.horizon + SAMPLES  # more than asked for: others will ask for more
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
    """Return what ``newcomer`` costs on each R-worker, as KV tokens that one of mean speed would attend more in each
    step.

    The load that is coming counts, not the one that is here: what a placement does to an R-worker shows a whole output
    later. So an R-worker costs the time of those steps in which the newcomer will be there, each weighted by what the
    newcomer attends in it: placed where that is least, newcomers keep the sum of squares of all R-workers' times, and
    with it the busiest one's time, as low as one choice can.

    ``speeds``: float64 [num_workers], in any unit. ``capacities``: int64 [num_workers], tokens that their blocks hold;
    what the forecast lacks of them would be preempted and computed again. ``hit_tokens``: of its prompt, by R-worker,
    what need not be computed there. Computing a row takes the S-worker as long as attending ``row_kv_tokens`` takes an
    R-worker of mean speed; both are spread over the newcomer's steps. Returns float64 [num_workers].
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
    """Tokens that tails will have beyond their ends, which other R-workers will have: float64 [num_workers, horizon].

    ``workers``, ``cached`` (tokens of the tail) and ``decode_steps``: int64 [n].
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
