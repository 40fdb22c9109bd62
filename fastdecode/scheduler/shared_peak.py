"""What a move of a sequence wins in the coming steps: each R-worker's part of the time that steps wait for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SAMPLES = 16
"""Steps, evenly spread over those looked at, in which R-workers are compared."""

HIGHEST = 1e6
"""Seconds above the busiest R-worker that no move comes to."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sequences of one R-worker: ``attended`` KV tokens of each in the first step, float64 [n], growing by one a step,
    and ``steps_left``, int64 [n]."""

    attended: np.ndarray
    steps_left: np.ndarray

    def in_steps(self, steps: np.ndarray) -> np.ndarray:
        """KV tokens that each attends in each of ``steps``: float64 [n, num_steps]."""
        runs = steps < self.steps_left[:, None]
        return (self.attended[:, None] + steps) * runs


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
        self.stride = max(1, loads.shape[1] // SAMPLES)
        self.steps = np.arange(0, loads.shape[1], self.stride)
        self.seconds_per_token = seconds_per_token
        self.times = loads[:, :: self.stride] * seconds_per_token[:, None]
        rising = np.maximum(np.sort(self.times, axis=0).T, hidden)  # [steps, num_workers]
        beyond = 2 * rising[:, -1:] + HIGHEST
        self._heights = np.concatenate([np.full_like(beyond, hidden), rising, beyond], axis=1)
        slices, num_above = np.diff(self._heights, axis=1), np.arange(len(loads), -1, -1)
        self._paid = np.pad(np.cumsum(slices / np.maximum(num_above, 1), axis=1), ((0, 0), (1, 0)))
        self._paid_by_one_more = np.pad(np.cumsum(slices / (num_above + 1), axis=1), ((0, 0), (1, 0)))

    def excess(self) -> np.ndarray:
        """What each R-worker pays above the mean one, seconds over all steps looked at: float64 [num_workers]."""
        means = self.times.mean(axis=0)
        own = [
            np.interp(times, heights, paid) - np.interp(mean, heights, paid)
            for times, mean, heights, paid in zip(self.times.T, means, self._heights, self._paid, strict=True)
        ]
        return self.stride * np.maximum(own, 0.0).sum(axis=0)

    def gains(self, source: int, candidates: Candidates, targets: np.ndarray) -> np.ndarray:
        """Seconds won over all steps looked at by a move from ``source`` to each of ``targets``: float64 [n, targets].

        Below the source's new time, and above its old one, the target is one more; in between it takes its place.
        """
        tokens = candidates.in_steps(self.steps)
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
