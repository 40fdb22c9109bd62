"""The number of draft tokens that each sequence verifies: as many as raise the expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fastdecode.core.protocols import StepTime
from fastdecode.scheduler.policy.draft_costs import LEVEL_RATE, GivenTimes, RowCost

FIRST_STEPS = 4
"""Decode steps without drafts at the beginning; the first steps are slow and tell little."""

PRIOR = 0.5
"""Assumed acceptance before any draft was verified. N-gram drafts reach 0.6 to 0.8 on code, and 0.3 on prose."""

LEAST_GAIN = 0.02
"""Least relative gain in tokens per second for which drafts are used. Forecasts are no more precise than this."""

LEAST_TRIAL_STEPS, MOST_TRIAL_STEPS = 16, 256
"""Least and most steps between trials.
The lower bound lets repetitive text be noticed soon; the upper bound limits how late a changed machine is noticed.
"""

NOTHING = np.zeros(1, np.int64)

LEAST_SECONDS = 1e-9
"""Least seconds of a step, which avoids a division by zero."""


class BalancedDrafts:
    """Adds draft tokens, likeliest first, as long as the expected tokens per second rise.
    A step of n sequences yields n tokens, and draft token j of a sequence with acceptance rate a yields another a^j.
    The step takes S + R - overlap · min(S, R) plus a constant. S, the S-worker's time, and R, the slowest R-worker's,
    depend on rows (:class:`RowCost`), and R on KV tokens too. So if R is longer than S, drafts are added until S is as
    long. If S is longer, none are added, unless rows turn out to cost the S-worker little: otherwise the step's time
    rises at least as fast as its tokens. Now and then a trial step assumes smaller slopes than fitted, and gives one
    more draft token to sequences whose drafts were rejected.
    """

    def __init__(self, most_drafts: int, num_mini_batches: int, step_time: StepTime | None = None) -> None:
        """``most_drafts``: most draft tokens per sequence.
        ``step_time``: step times known beforehand; None to fit observed steps.
        """
        self._most_drafts = most_drafts
        self._overlaps = num_mini_batches > 1
        self._given = GivenTimes(step_time) if step_time else None
        # Slope of the S-worker's time to assume until the number of rows changes: proportional to rows, the worst case
        s_slope = 1.0
        # Slope of the R-workers' time to assume until the number of rows changes, relative to the time that reading a
        # sequence's cache takes. Measured: 0.04 (MHA, bfloat16), 0.4 (GQA, groups of 4), 0.8 (groups of 8).
        r_slope = 0.25
        self._s_part, self._r_part = RowCost(s_slope, 1.0), RowCost(r_slope, r_slope)
        self._drafting = RowCost(s_slope, 1.0)
        self._overlap = self._exposed = 0.0
        self._num_steps = 0
        self._pooled = PRIOR
        self._wait = LEAST_TRIAL_STEPS if step_time else 1
        self._wanted, self._filled = 0, 1.0

    def acceptance(self, tried: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Return each sequence's acceptance rate: from its own drafts, and from all drafts while its own are few."""
        # Number of verified drafts at which the rate observed over all sequences weighs as much as the rate assumed
        # before
        pool_weight = 4.0
        self._pooled = (float(kept.sum()) + pool_weight * PRIOR) / (float(tried.sum()) + pool_weight)
        # Number of a sequence's verified drafts at which its own rate weighs as much as the rate of all sequences
        prior_weight = 2.0
        return (kept + prior_weight * self._pooled) / (tried + prior_weight)

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        """Return how many draft tokens each sequence gets, int64 [n], from 0 to ``most``.
        See :class:`fastdecode.core.protocols.DraftPolicy`.
        """
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
        """Learn the time of a decode step with ``num_tokens`` rows of ``num_sequences`` sequences.
        See ``DraftPolicy``.
        """
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
        """Learn the seconds of drafting ``num_passes`` tokens for each of ``num_sequences`` sequences.
        See ``DraftPolicy``.
        """
        if num_sequences and num_passes:
            self._drafting.observe(num_sequences, seconds / num_passes)

    def _trial(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        """Choose drafts as if slopes were small and unknown acceptance rates good; set the time of the next trial."""
        low = acceptance < PRIOR
        hopeful, few = np.where(low, PRIOR, acceptance), np.where(low, np.minimum(most, 1), most)
        usual = int(self._best(acceptance, most, num_tokens, kv_loads).sum())
        s_bound = self._given is None and self._s_part.level >= self._r_part.level * kv_loads.sum()
        rows = num_tokens + usual
        # Most additional rows in a trial, as a fraction of the step's rows, if the S-worker is the bottleneck;
        # otherwise the number of rows may double
        trial_rows = 0.25
        # Additional rows that every trial may have, since a step of a few rows takes as long as one of 16
        free_rows = 4
        budget = usual + max(free_rows, math.ceil(trial_rows * rows) if s_bound else rows)
        # Standard errors by which a trial lowers the slopes, in order to explore
        optimism = 2.0
        chosen = self._best(hopeful, few, num_tokens, kv_loads, optimism, budget)
        more = np.array([usual, max(usual, int(chosen.sum()))])
        before, after = self._seconds(num_tokens, self._filled * more, max(1, int(more.max())), kv_loads).tolist()
        after += float(self._drafting.at(np.array([np.count_nonzero(chosen)]))[0]) * (usual == 0)
        # Fraction of all time that trials may take: a trial that costs little is repeated soon
        trial_cost = 0.005
        steps = (after - before) / max(before, LEAST_SECONDS) / trial_cost if chosen.any() else math.inf
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
        num_sequences, width = len(acceptance), self._most_drafts
        chances = np.empty((num_sequences, width))
        chances[:] = np.minimum(acceptance, 1.0)[:, None]
        np.multiply.accumulate(chances, axis=1, out=chances)
        chances *= np.arange(width) < most[:, None]
        flat = chances.ravel()
        # Probabilities of acceptance are sorted as 16-bit integers, which is five times as fast
        scale = 65534
        # NumPy sorts 16-bit integers by radix sort if stable
        order = np.argsort(((1.0 - flat) * scale).astype(np.uint16), kind="stable")
        # Draft tokens whose probability of acceptance is lower are not considered
        least_chance = 1e-3
        total = int(np.count_nonzero(flat > least_chance))
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
        if self._given:
            return self._given.at(num_tokens, more, most_more, kv_loads)
        s_part = self._s_part.at(num_tokens + more, optimism)
        r_part = self._r_part.at(num_tokens + more, optimism) * kv_loads.sum()
        return s_part + r_part - self._overlap * np.minimum(s_part, r_part) + self._exposed


def _best_count(rates: Callable[[np.ndarray], np.ndarray], total: int) -> int:
    """Return the count from 0 to ``total`` with the highest of ``rates``, which rise and then fall.
    Return 0 if that rate hardly exceeds the rate of count 0 (by less than LEAST_GAIN).
    """
    # Counts that are tried first; then those around the best one are tried
    num_points = 64
    step = 1 + total // num_points
    counts = np.append(np.arange(0, total, step), total)
    found = rates(counts)
    least, place = (1 + LEAST_GAIN) * found[0], int(found.argmax())
    if step > 1:
        counts = np.arange(counts[max(0, place - 1)], counts[min(place + 1, len(counts) - 1)] + 1)
        found = rates(counts)
        place = int(found.argmax())
    return int(counts[place]) if found[place] >= least else 0
