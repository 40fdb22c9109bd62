"""How many draft tokens each sequence verifies: as many as raise the tokens that are expected per second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fastdecode.protocols import StepTime

FIRST_STEPS = 4
"""Decode steps that are seen before anything is drafted: the first are slower, and say little."""

LEVEL_RATE = 1 / 16
"""Weight of the last step in what a step takes now: noise falls to a fifth, and drift is followed in seconds."""

MOST_JUMP = 0.5
"""Of a step's time, above or below what was expected: more is a pause of the machine, and counts as this."""

SLOPE_MEMORY = 2.0
"""Squared relative changes of the rows that a slope rests on: two doublings, or 32 trials of a quarter. Steps with the
same rows say nothing of it, and so it is not forgotten while rows stay the same."""

LEAST_CHANGE = 0.05
"""Of the rows: what a smaller one does is lost in noise."""

SLOPE_PRIOR_WEIGHT = 0.05
"""Of the slope taken beforehand, in the same unit: less than one trial of a quarter."""

S_SLOPE = 1.0
"""Until rows were seen to change: S time in proportion to rows, the most it can be."""

R_SLOPE = 0.25
"""Rows over one read of a cache cost an R-worker little: 0.04 (MHA, bfloat16) to 0.15 (groups of 4) were measured."""

PRIOR = 0.5
"""Acceptance before any draft was tested: n-grams of code reach 0.6 to 0.8, of prose 0.3."""

PRIOR_WEIGHT = 2.0
"""Tests of its own after which a sequence counts as much as all others together: one verification."""

POOL_WEIGHT = 4.0
"""Tests of all sequences after which they count as much as ``PRIOR``."""

LEAST_GAIN = 0.02
"""Below it no drafts: the forecast is no better, and drafts cost the host a little."""

TRIAL_COST = 0.005
"""Of all time, what trials take: they come as often as they are cheap."""

LEAST_TRIAL_STEPS, MOST_TRIAL_STEPS = 16, 256
"""From one trial to the next: text that begins to repeat is to be noticed soon, and where no drafts would pay, a change
of the machine at last."""

TRIAL_ROWS = 0.25
"""More rows, at most, in a trial where the S-worker is the bottleneck; elsewhere twice as many."""

FREE_ROWS = 4
"""More rows that a trial may always have: a step of a few rows takes as long as one of 16."""

OPTIMISM = 2.0
"""Standard errors by which slopes count as smaller in a trial, which is to find out."""

MOST_POINTS = 33
"""Numbers of rows at which a given ``StepTime`` is asked, most of them low; straight lines between them."""

SAME_LOAD = 0.02
"""A change of the KV load that is not worth asking it again."""

LEAST_CHANCE = 1e-3
"""Of a draft token: with less it is not considered."""

NOTHING = np.zeros(1, np.int64)

NUM_POINTS = 64
"""Numbers of draft tokens that are compared, before those around the best are."""

SCALE = 65534
"""Chances are ordered as 16-bit numbers: thousands of them in a fifth of the time."""

LEAST_SECONDS = 1e-9
"""Of a step."""

LEAST_NOISE = 1e-4
"""Variance of a step's time over its square: 1 %."""

WIDTH_RATE = LEVEL_RATE / 16
"""Per step, at which a wide range of rows that was seen is forgotten."""


class RowCost:
    """What a step of so many rows takes, in any unit: level + slope · (x - rows).

    Level and rows are means of the last steps. The slope is fitted to the changes from step to step, and lies between
    0, the same for any number of rows, and level / rows, in proportion to them. Beyond the most rows that were seen
    lately it counts as ``beyond`` of that proportion at least.
    """

    def __init__(self, prior: float, beyond: float) -> None:
        """``prior``: the slope until rows were seen to change, as a part of level / rows."""
        self.rows = self.level = 0.0
        self._prior, self._beyond = prior, beyond
        self._products = self._squares = self._noise = self._widest = 0.0
        self._count = 0

    def slope(self, optimism: float = 0.0) -> float:
        """Per row, less ``optimism`` standard errors."""
        if not self.rows:
            return 0.0
        unit, proportional = self.rows * self.rows, self.level / self.rows
        weight = SLOPE_PRIOR_WEIGHT * unit
        fitted = (self._products + weight * self._prior * proportional) / (self._squares + weight)
        error = math.sqrt(max(self._noise, LEAST_NOISE) * unit / max(self._squares, 1e-9 * unit))
        return min(max(0.0, fitted - optimism * error * proportional), proportional)

    def observe(self, rows: float, value: float) -> None:
        """A step of ``rows`` rows took ``value``."""
        self._count += 1
        rate = max(LEVEL_RATE, 1 / self._count)
        if self.level > 0:
            value = self._fit(rows, value, rate)
        self.level += rate * (value - self.level)
        self.rows += rate * (rows - self.rows)
        self._widest = max(rows, self._widest - WIDTH_RATE * (self._widest - self.rows))

    def at(self, rows: np.ndarray, optimism: float = 0.0) -> np.ndarray:
        """Expected of each of ``rows``, float64 [n]."""
        slope = self.slope(optimism)
        if not self._widest:
            return np.zeros(len(rows))
        beyond, widest = slope, self.level + slope * (self._widest - self.rows)
        if not optimism:
            beyond = max(slope, self._beyond * widest / self._widest)
        further = rows - self._widest
        return widest + slope * np.minimum(further, 0.0) + beyond * np.maximum(further, 0.0)

    def _fit(self, rows: float, value: float, rate: float) -> float:
        """Returns ``value``, less what of it is a pause."""
        expected, change = self.level + self.slope() * (rows - self.rows), rows - self.rows
        relative = change / self.rows
        highest = (1.0 + MOST_JUMP) * max(expected, self.level * rows / self.rows)
        value = min(value, highest)
        self._noise += rate * (((value - expected) / self.level) ** 2 - self._noise)
        kept = min(1.0, SLOPE_MEMORY * self.rows**2 / max(self._squares, 1e-9))
        kept *= SLOPE_MEMORY / (SLOPE_MEMORY + relative**2)
        if abs(relative) < LEAST_CHANGE:
            return value
        most = change * self.level / self.rows  # what rows can explain; the rest is drift
        self._products = kept * self._products + change * min(max(value - self.level, min(0.0, most)), max(0.0, most))
        self._squares = kept * self._squares + change * change
        return value


class BalancedDrafts:
    """Takes draft tokens in the order of their chances while the tokens that are expected per second rise.

    A step of n sequences gives n tokens, and draft j of a sequence with acceptance a another a^j. It takes
    S + R - overlap · min(S, R) and a constant: S and R, of the slowest R-worker, by rows (:class:`RowCost`), R by KV
    tokens too. So R-bound steps have drafts until S has become as long. S-bound ones have none, since their time
    rises with rows as fast as tokens do, or faster; unless rows turn out to be free on the S side as well.

    Now and then comes a trial, in which slopes count as smaller than fitted, and sequences whose drafts were rejected
    get one more.
    """

    def __init__(self, most_drafts: int, num_mini_batches: int, step_time: StepTime | None = None) -> None:
        """``most_drafts`` of a sequence; ``step_time``: as calibrated; None: fitted to the steps that are observed."""
        self._most_drafts = most_drafts
        self._overlaps = num_mini_batches > 1
        self._given = GivenTimes(step_time) if step_time else None
        self._s_part, self._r_part = RowCost(S_SLOPE, 1.0), RowCost(R_SLOPE, R_SLOPE)
        self._drafting = RowCost(S_SLOPE, 1.0)
        self._overlap = self._exposed = 0.0
        self._num_steps = 0
        self._pooled = PRIOR
        self._wait = LEAST_TRIAL_STEPS if step_time else 1
        self._wanted, self._filled = 0, 1.0

    def acceptance(self, tried: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Of each sequence, from its own drafts and, as long as those are few, from all sequences'."""
        self._pooled = (float(kept.sum()) + POOL_WEIGHT * PRIOR) / (float(tried.sum()) + POOL_WEIGHT)
        return (kept + PRIOR_WEIGHT * self._pooled) / (tried + PRIOR_WEIGHT)

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        """int64 [n], from 0 to ``most``; see :class:`fastdecode.protocols.DraftPolicy`."""
        self._wanted = 0
        if not len(acceptance) or (self._given is None and self._num_steps < FIRST_STEPS):
            return np.zeros(len(acceptance), np.int64)
        self._wait -= 1
        if self._wait <= 0:
            chosen = self._trial(acceptance, most, num_tokens, kv_loads)
        else:
            chosen = self._best(acceptance, most, num_tokens, kv_loads)
        self._wanted = int(chosen.sum())
        return chosen

    def observe(
        self,
        num_tokens: int,
        num_sequences: int,
        kv_loads: Sequence[int],
        s_seconds: float,
        wait_seconds: float,
        r_seconds: Sequence[float],
    ) -> None:
        """A decode step of ``num_tokens`` rows of ``num_sequences`` took so long; see ``DraftPolicy``."""
        self._num_steps += 1
        if self._wanted:
            share = min(1.0, (num_tokens - num_sequences) / self._wanted)
            self._filled += LEVEL_RATE * (share - self._filled)
        busiest, rate = max(r_seconds), max(LEVEL_RATE, 1 / self._num_steps)
        self._s_part.observe(num_tokens, s_seconds)
        self._r_part.observe(num_tokens, busiest / max(1, sum(kv_loads)))
        least = min(s_seconds, busiest)
        if self._overlaps and least > 0:
            hidden = min(max(0.0, (busiest - wait_seconds) / least), 1.0)
            self._overlap += rate * (hidden - self._overlap)
        self._exposed += rate * (max(0.0, wait_seconds - busiest) - self._exposed)

    def observe_drafting(self, num_sequences: int, num_passes: int, seconds: float) -> None:
        """``num_passes`` draft tokens of each of ``num_sequences`` took so long; see ``DraftPolicy``."""
        if num_sequences and num_passes:
            self._drafting.observe(num_sequences, seconds / num_passes)

    def _trial(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        """As if nothing were known of sequences with low acceptance, and slopes were small; sets the next trial."""
        low = acceptance < PRIOR
        hopeful, few = np.where(low, PRIOR, acceptance), np.where(low, np.minimum(most, 1), most)
        usual = int(self._best(acceptance, most, num_tokens, kv_loads).sum())
        s_bound = self._given is None and self._s_part.level >= self._r_part.level * kv_loads.sum()
        rows = num_tokens + usual
        budget = usual + max(FREE_ROWS, math.ceil(TRIAL_ROWS * rows) if s_bound else rows)
        chosen = self._best(hopeful, few, num_tokens, kv_loads, OPTIMISM, budget)
        more = np.array([usual, max(usual, int(chosen.sum()))])
        before, after = self._seconds(num_tokens, self._filled * more, max(1, int(more.max())), kv_loads).tolist()
        after += float(self._drafting.at(np.array([np.count_nonzero(chosen)]))[0]) * (usual == 0)
        steps = (after - before) / max(before, LEAST_SECONDS) / TRIAL_COST if chosen.any() else math.inf
        self._wait = int(min(max(steps, LEAST_TRIAL_STEPS), MOST_TRIAL_STEPS))
        return chosen

    def _best(
        self,
        acceptance: np.ndarray,
        most: np.ndarray,
        num_tokens: int,
        kv_loads: np.ndarray,
        optimism: float = 0.0,
        budget: int | None = None,
    ) -> np.ndarray:
        """Of draft tokens in falling order of their chances, as many as give the most tokens per second."""
        num_sequences, width = len(acceptance), self._most_drafts
        chances = np.empty((num_sequences, width))
        chances[:] = np.minimum(acceptance, 1.0)[:, None]
        np.multiply.accumulate(chances, axis=1, out=chances)
        chances *= np.arange(width) < most[:, None]
        flat = chances.ravel()
        order = np.argsort(((1.0 - flat) * SCALE).astype(np.uint16), kind="stable")  # a radix sort
        total = int(np.count_nonzero(flat > LEAST_CHANCE))
        order = order[: total if budget is None else min(total, budget)]
        total = len(order)
        if not total:
            return np.zeros(num_sequences, np.int64)
        gains = np.concatenate((NOTHING, np.cumsum(flat[order])))
        passes = np.concatenate((NOTHING, np.maximum.accumulate(order % width + 1))) if self._drafting.level else None

        def rates(counts: np.ndarray) -> np.ndarray:
            seconds = self._seconds(num_tokens, self._filled * counts, total, kv_loads, optimism)
            if passes is not None:
                seconds = seconds + passes[counts] * self._drafting.at(np.minimum(counts, num_sequences))
            return (num_sequences + self._filled * gains[counts]) / np.maximum(seconds, LEAST_SECONDS)

        return np.bincount(order[: _best_count(rates, total)] // width, minlength=num_sequences)

    def _seconds(
        self, num_tokens: int, more: np.ndarray, most_more: int, kv_loads: np.ndarray, optimism: float = 0.0
    ) -> np.ndarray:
        """Of a step with ``more`` rows than ``num_tokens``, float64 [...], none above ``most_more``."""
        if self._given:
            return self._given.at(num_tokens, more, most_more, kv_loads)
        s_part = self._s_part.at(num_tokens + more, optimism)
        r_part = self._r_part.at(num_tokens + more, optimism) * kv_loads.sum()
        return s_part + r_part - self._overlap * np.minimum(s_part, r_part) + self._exposed


class GivenTimes:
    """A ``StepTime`` asked at a few numbers of rows, with straight lines between them, and again once those change."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self._key = (0, 0, 0)
        self._rows = self._times = np.zeros(0)

    def at(self, num_tokens: int, more: np.ndarray, most_more: int, kv_loads: np.ndarray) -> np.ndarray:
        """Seconds of steps with ``more`` rows than ``num_tokens``; all R-workers count as loaded as the busiest."""
        kv_tokens = int(kv_loads.max() * len(kv_loads)) if len(kv_loads) else 0
        tokens, most, loads = self._key
        if (tokens, most) != (num_tokens, most_more) or abs(kv_tokens - loads) > SAME_LOAD * loads:
            self._key = (num_tokens, most_more, kv_tokens)
            places = (
                np.linspace(0, 1, MOST_POINTS) ** 2 if most_more >= MOST_POINTS else np.linspace(0, 1, most_more + 1)
            )
            self._rows = np.unique(np.rint(most_more * places).astype(int))
            self._times = np.array([self._step_time(num_tokens + int(rows), kv_tokens) for rows in self._rows])
        return np.interp(more, self._rows, self._times)


def _best_count(rates: Callable[[np.ndarray], np.ndarray], total: int) -> int:
    """The number from 0 to ``total`` with the highest of ``rates``, which rise and then fall; 0 for too little gain."""
    step = 1 + total // NUM_POINTS
    counts = np.append(np.arange(0, total, step), total)
    found = rates(counts)
    least, place = (1 + LEAST_GAIN) * found[0], int(found.argmax())
    if step > 1:
        counts = np.arange(counts[max(0, place - 1)], counts[min(place + 1, len(counts) - 1)] + 1)
        found = rates(counts)
        place = int(found.argmax())
    return int(counts[place]) if found[place] >= least else 0
