"""Prices of copying cached tokens, and the time that a move saves in the coming steps."""

from __future__ import annotations

import math

import numpy as np

from fastdecode.scheduler.places.speeds import KEPT, LEAST_SECONDS, Decayed, Observed, Speeds


class TransferPrice:
    """The seconds per token of past transfers of any kind: necessary moves, moves for balance, and second copies."""

    def __init__(self, per_token: float) -> None:
        """``per_token``: seconds per token to assume before the first transfer; it may be infinite."""
        self.per_token = per_token
        self._seen = Decayed(KEPT, 2)  # the two sums: seconds of transfers, and tokens copied

    def paid(self, num_tokens: int, seconds: float) -> None:
        """Record that a transfer of ``num_tokens`` cached tokens took ``seconds``."""
        self._seen.add(seconds, num_tokens)
        self.per_token = self._seen.ratio(0, 1, 1.0)


SHARE = 0.05
"""Fraction of the steps' time that moves for balance ("corrections") may take."""

MOST_STEPS = 8.0
"""Most time for one correction, in steps. Decodes wait meanwhile, so each token is late by that time."""


class MovePrices:
    """Decides whether a move for balance is worth its time.
    It must save twice its own time, during which every sequence waits. The price per token is taken from past
    transfers. All moves for balance together take at most the fraction ``SHARE`` of the steps' time, so after one, the
    next must wait for some steps. This bounds the cost of wrong forecasts.
    """

    def __init__(self, price: TransferPrice, speeds: Speeds, corrects: bool) -> None:
        """``corrects``: True if moves for balance are allowed at all."""
        self._price, self._speeds, self._corrects = price, speeds, corrects
        # the sums: busy seconds, KV tokens, busy seconds that lengthen no step, steps, and seconds of these steps
        self._seen = Decayed(KEPT, 5)
        # Factor by which a step reduces the weight of earlier steps in counts of starts, which are rare
        kept_of_rare = 0.995
        self._begun = Decayed(kept_of_rare, 3)  # the sums: starts, prompt rows, and steps
        self._credit = 0.0
        self._pause = 0
        self._is_uneven = False

    def observe(self, observed: Observed) -> None:
        """Learn from the times of the step ``observed``."""
        # KV tokens that an R-worker of mean speed would attend in the same time
        work = np.array(observed.step.kv_loads) * self._speeds.relative_times
        r_seconds, wait_seconds = np.array(observed.r_seconds), observed.wait_seconds
        busiest, step_seconds = float(r_seconds.max(initial=0.0)), observed.s_seconds + wait_seconds
        hidden = max(0.0, busiest - wait_seconds)
        self._seen.add(float(r_seconds.sum()), float(work.sum()), hidden, 1.0, step_seconds)
        at_work = r_seconds[work > 0]
        above_mean = busiest - float(at_work.sum() / len(at_work)) if len(at_work) else 0.0
        # Moves are considered if the busiest R-worker's time exceeds the mean by this fraction of a step
        uneven = 0.02
        self._is_uneven = min(above_mean, wait_seconds) > uneven * step_seconds
        self._credit = min(self._credit + SHARE * step_seconds, 0.0)
        self._pause = max(0, self._pause - 1)
        self._begun.add(observed.step.num_starts, observed.step.num_prompt_rows, 1.0)

    def steps_to_bring(self, kv_tokens: float) -> int:
        """Return in how many steps new sequences will attend ``kv_tokens`` per step if starts go on as now; at least 1.
        New sequences are placed where the load is least. So an imbalance is gone once they attend the missing KV
        tokens, and a move saves time until then. With s starts and p prompt rows per step, they attend p·t + s·t²/2
        after t steps.
        """
        starts, rows = (self._begun.ratio(each, 2, 1.0) for each in (0, 1))
        # returned if no sequence starts
        never = 1 << 30
        if not rows:
            return never
        root = math.sqrt(rows * rows + 2 * starts * kv_tokens)
        return max(1, min(never, round(2 * kv_tokens / (rows + root))))

    @property
    def may_pay(self) -> bool:
        """True if the load is uneven, and the time for moves for balance is not used up."""
        is_known = self._seen.sums[0] >= LEAST_SECONDS
        return self._corrects and is_known and self._is_uneven and self._credit >= 0 and not self._pause

    @property
    def hidden(self) -> float:
        """Seconds per step in which R-workers are busy beside the S-worker, so that the step does not get longer."""
        return self._seen.ratio(2, 3)

    @property
    def seconds_per_token(self) -> float:
        """Seconds per attended KV token of an R-worker of mean speed; 1 before enough steps were observed."""
        known = self._seen.sums[0] >= LEAST_SECONDS and self._seen.sums[1] > 0
        return self._seen.ratio(0, 1) if known else 1.0

    @property
    def most_tokens(self) -> float:
        """Most tokens that one move for balance may copy."""
        return MOST_STEPS * self._seen.ratio(4, 3) / max(self._price.per_token, 1e-300)

    def looked(self, found: bool) -> None:
        """Record whether a search found a move for balance; if not, pause further searches."""
        # Steps to wait after a search that found no move
        pause_steps = 16
        self._pause = 0 if found else pause_steps

    def worth(self, gains: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Return the seconds that moves save beyond twice their price, float64 [n, num_targets].
        ``gains``: seconds that they save, of the same shape. ``num_tokens``: cached tokens of each move, float64 [n].
        """
        return gains - 2 * self._price.per_token * num_tokens[:, None]

    def corrected(self, seconds: float) -> None:
        """Record that a move for balance took ``seconds``."""
        self._credit -= seconds


def attended_in(steps: np.ndarray, attended: np.ndarray, steps_left: np.ndarray) -> np.ndarray:
    """Return the KV tokens that each of n sequences attends in each of ``steps``: float64 [n, num_steps].
    ``steps``: int64 [num_steps]. ``attended``: tokens of each sequence in the first step, float64 [n], growing by one
    per step. ``steps_left``: steps until each sequence ends, int64 [n].
    """
    return (attended[:, None] + steps) * (steps < steps_left[:, None])


class SharedPeak:
    """The time by which R-workers lengthen the coming steps, divided among them.

    A step waits for the busiest R-worker. If several R-workers are equally busy, a move from one of them alone saves
    nothing, though moves from each of them do. So time above ``hidden``, which a step takes anyway, is divided slice by
    slice. Each of the N(y) R-workers busy for at least y is charged dy / N(y) of a slice dy at height y. This is the
    Shapley value of the busiest R-worker's time (Littlechild and Owen, "A simple expression for the Shapley value in a
    special case", 1973). The charges add up to the busiest R-worker's time above ``hidden``. A move gains the reduction
    of the source's charge less the increase of the target's.

    ``loads``: KV tokens of each R-worker in each coming step, float64 [num_workers, horizon]; ``seconds_per_token``:
    float64 [num_workers]; ``hidden``: seconds.
    """

    def __init__(self, loads: np.ndarray, seconds_per_token: np.ndarray, hidden: float) -> None:
        # Number of evenly spread coming steps in which R-workers are compared
        samples = 16
        self.stride = max(1, loads.shape[1] // samples)
        self.steps = np.arange(0, loads.shape[1], self.stride)
        self.seconds_per_token = seconds_per_token
        self.times = loads[:, :: self.stride] * seconds_per_token[:, None]
        rising = np.maximum(np.sort(self.times, axis=0).T, hidden)  # [steps, num_workers], ascending in each step
        # Seconds to add to twice the busiest R-worker's time, so that an R-worker's time after any move stays below
        highest = 1e6
        beyond = 2 * rising[:, -1:] + highest
        self._heights = np.concatenate([np.full_like(beyond, hidden), rising, beyond], axis=1)
        slices, num_above = np.diff(self._heights, axis=1), np.arange(len(loads), -1, -1)
        self._paid = np.pad(np.cumsum(slices / np.maximum(num_above, 1), axis=1), ((0, 0), (1, 0)))
        self._paid_by_one_more = np.pad(np.cumsum(slices / (num_above + 1), axis=1), ((0, 0), (1, 0)))

    def excess(self) -> np.ndarray:
        """Return each R-worker's charge minus that of one with the mean time, at least 0: float64 [num_workers].
        The unit is seconds over all coming steps.
        """
        means = self.times.mean(axis=0)
        own = [
            np.interp(times, heights, paid) - np.interp(mean, heights, paid)
            for times, mean, heights, paid in zip(self.times.T, means, self._heights, self._paid, strict=True)
        ]
        return self.stride * np.maximum(own, 0.0).sum(axis=0)

    def gains(self, source: int, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the seconds saved by moving each of n sequences from ``source`` to ``targets``: float64 [n, targets].
        ``tokens``: KV tokens that each sequence attends in each of ``steps``, float64 [n, num_steps]. Below the
        source's new time, and above its old time, the target adds to the number of busy R-workers. Between these times
        it replaces the source.
        """
        gains = np.zeros((len(tokens), len(targets)))
        for step in range(len(self.steps)):
            heights, before = self._heights[step], self.times[source, step]
            paid, one_more = self._paid[step], self._paid_by_one_more[step]
            low = (before - tokens[:, step] * self.seconds_per_token[source])[:, None]
            start = self.times[targets, step][None]
            end = start + tokens[:, step, None] * self.seconds_per_token[targets]
            gains += np.interp(before, heights, paid) - np.interp(low, heights, paid)
            for costs, least, most in ((one_more, -np.inf, low), (paid, low, before), (one_more, before, np.inf)):
                gains -= np.interp(np.clip(end, least, most), heights, costs)
                gains += np.interp(np.clip(start, least, most), heights, costs)
        return self.stride * gains
