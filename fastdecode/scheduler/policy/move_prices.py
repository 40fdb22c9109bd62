"""What copying cached tokens takes, and what a move of a sequence wins in the coming steps."""

from __future__ import annotations

import math

import numpy as np

from fastdecode.scheduler.places.speeds import KEPT, LEAST_SECONDS, Decayed, Observed, Speeds


class TransferPrice:
    """Seconds per token, as all transfers so far took: moves that must be, corrections, and second copies alike."""

    def __init__(self, per_token: float) -> None:
        """``per_token``: seconds, before any token was copied; it may be infinite."""
        self.per_token = per_token
        self._seen = Decayed(KEPT, 2)  # seconds, tokens

    def paid(self, num_tokens: int, seconds: float) -> None:
        """A transfer of ``num_tokens`` cached tokens took ``seconds``."""
        self._seen.add(seconds, num_tokens)
        self.per_token = self._seen.ratio(0, 1, 1.0)


SHARE = 0.05
"""The part of the steps' time that corrections may take."""

MOST_STEPS = 8.0
"""Steps in whose time one correction must be done: decodes wait for it, each as much longer for its next token."""


class MovePrices:
    """A correction pays if it wins twice the time that it takes, which every sequence waits for.

    What transfers took so far says what the next one takes. All corrections
    together take at most ``SHARE`` of the steps' time, the last one on credit: after it the next waits for it to be
    earned. So wrong forecasts cost no more than that.
    """

    def __init__(self, price: TransferPrice, speeds: Speeds, corrects: bool) -> None:
        """``corrects``: whether anything may be corrected."""
        self._price, self._speeds, self._corrects = price, speeds, corrects
        self._seen = Decayed(KEPT, 5)  # busy seconds, KV tokens, hidden seconds, steps, their seconds
        # The part of the past that counts of starts after another step; they are rare
        kept_of_rare = 0.995
        self._begun = Decayed(kept_of_rare, 3)  # starts, rows of prompts, steps
        self._credit = 0.0
        self._pause = 0
        self._is_uneven = False

    def observe(self, observed: Observed) -> None:
        """One step has ended."""
        work = np.array(observed.step.kv_loads) * self._speeds.relative_times  # KV tokens, as if at mean speed
        r_seconds, wait_seconds = np.array(observed.r_seconds), observed.wait_seconds
        busiest, step_seconds = float(r_seconds.max(initial=0.0)), observed.s_seconds + wait_seconds
        hidden = max(0.0, busiest - wait_seconds)
        self._seen.add(float(r_seconds.sum()), float(work.sum()), hidden, 1.0, step_seconds)
        at_work = r_seconds[work > 0]
        above_mean = busiest - float(at_work.sum() / len(at_work)) if len(at_work) else 0.0
        # Part of a step that the busiest R-worker must cost above the mean one: less is not worth a look
        uneven = 0.02
        self._is_uneven = min(above_mean, wait_seconds) > uneven * step_seconds
        self._credit = min(self._credit + SHARE * step_seconds, 0.0)
        self._pause = max(0, self._pause - 1)
        self._begun.add(observed.step.num_starts, observed.step.num_prompt_rows, 1.0)

    def steps_to_bring(self, kv_tokens: float) -> int:
        """Until newcomers attend ``kv_tokens`` in a step, if they come as they do; at least one.

        They are placed where least is, so whatever is uneven is even again once they attend what the others lack: a
        move wins time until then. With s starts and p rows of prompts a step they attend p·t + s·t²/2 after t.
        """
        starts, rows = (self._begun.ratio(each, 2, 1.0) for each in (0, 1))
        # The steps until newcomers come, where nothing starts
        never = 1 << 30
        if not rows:
            return never
        root = math.sqrt(rows * rows + 2 * starts * kv_tokens)
        return max(1, min(never, round(2 * kv_tokens / (rows + root))))

    @property
    def may_pay(self) -> bool:
        """True if to look for a correction now."""
        is_known = self._seen.sums[0] >= LEAST_SECONDS
        return self._corrects and is_known and self._is_uneven and self._credit >= 0 and not self._pause

    @property
    def hidden(self) -> float:
        """Seconds that R-workers are busy in a step without making it longer."""
        return self._seen.ratio(2, 3)

    @property
    def seconds_per_token(self) -> float:
        """The seconds that a step takes an R-worker of mean speed per KV token that it attends; 1 before enough was
        seen."""
        known = self._seen.sums[0] >= LEAST_SECONDS and self._seen.sums[1] > 0
        return self._seen.ratio(0, 1) if known else 1.0

    @property
    def most_tokens(self) -> float:
        """The most tokens that a correction may move."""
        return MOST_STEPS * self._seen.ratio(4, 3) / max(self._price.per_token, 1e-300)

    def looked(self, found: bool) -> None:
        """A look for a correction found one, or none."""
        # After a look that found nothing worth its price
        pause_steps = 16
        self._pause = 0 if found else pause_steps

    def worth(self, gains: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Return seconds that moves win above their price, float64 [n, num_targets].

        ``gains``: seconds, of the same shape; ``num_tokens``: cached tokens of each, float64 [n].
        """
        return gains - 2 * self._price.per_token * num_tokens[:, None]

    def corrected(self, seconds: float) -> None:
        """A correction took ``seconds``."""
        self._credit -= seconds


def attended_in(steps: np.ndarray, attended: np.ndarray, steps_left: np.ndarray) -> np.ndarray:
    """Return KV tokens that sequences attend in each of ``steps``, int64 [num_steps]: float64 [n, num_steps].

    ``attended``: of each in the first step, float64 [n], growing by one a step; ``steps_left``: int64 [n].
    """
    return (attended[:, None] + steps) * (steps < steps_left[:, None])


class SharedPeak:
    """The time by which R-workers hold up the coming steps, shared among them.

    A step waits for the busiest R-worker, but where several are as busy, a move from one of them wins nothing by
    itself, though a move from each of them does. So time above ``hidden``, what a step takes anyway, is shared
    slice by slice: of a slice dy at height y each of the N(y) R-workers that are at least so busy has dy / N(y), its
    Shapley value where the busiest pays (Littlechild and Owen, "A simple expression for the Shapley value in a special
    case", 1973). The sum of all parts is the busiest one's time above ``hidden``. A move is worth what the source
    pays less and the target pays more.

    ``loads``: KV tokens of each R-worker in each coming step, float64 [num_workers, horizon]; ``seconds_per_token``:
    float64 [num_workers]; ``hidden``: seconds.
    """

    def __init__(self, loads: np.ndarray, seconds_per_token: np.ndarray, hidden: float) -> None:
        # Steps, evenly spread over those looked at, in which R-workers are compared
        samples = 16
        self.stride = max(1, loads.shape[1] // samples)
        self.steps = np.arange(0, loads.shape[1], self.stride)
        self.seconds_per_token = seconds_per_token
        self.times = loads[:, :: self.stride] * seconds_per_token[:, None]
        rising = np.maximum(np.sort(self.times, axis=0).T, hidden)  # [steps, num_workers]
        # Seconds above the busiest R-worker that no move comes to
        highest = 1e6
        beyond = 2 * rising[:, -1:] + highest
        self._heights = np.concatenate([np.full_like(beyond, hidden), rising, beyond], axis=1)
        slices, num_above = np.diff(self._heights, axis=1), np.arange(len(loads), -1, -1)
        self._paid = np.pad(np.cumsum(slices / np.maximum(num_above, 1), axis=1), ((0, 0), (1, 0)))
        self._paid_by_one_more = np.pad(np.cumsum(slices / (num_above + 1), axis=1), ((0, 0), (1, 0)))

    def excess(self) -> np.ndarray:
        """Return what each R-worker pays above the mean one, seconds over all steps looked at: float64
        [num_workers]."""
        means = self.times.mean(axis=0)
        own = [
            np.interp(times, heights, paid) - np.interp(mean, heights, paid)
            for times, mean, heights, paid in zip(self.times.T, means, self._heights, self._paid, strict=True)
        ]
        return self.stride * np.maximum(own, 0.0).sum(axis=0)

    def gains(self, source: int, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Seconds won over all steps looked at by a move from ``source`` to each of ``targets``: float64 [n, targets].

        ``tokens``: what each sequence attends in each of ``steps``, float64 [n, num_steps].
        Below the source's new time, and above its old one, the target is one more; in between it takes its place.
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
