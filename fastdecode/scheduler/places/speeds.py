"""Decaying sums of step times, and each R-worker's speed derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fastdecode.core.step import ScheduledStep


@dataclass(frozen=True)
class Observed:
    """The seconds of one step: the S-worker's own, its waiting for R-workers, and each R-worker's busy seconds."""

    step: ScheduledStep
    s_seconds: float
    wait_seconds: float
    r_seconds: Sequence[float]

    @cached_property
    def shows_speeds(self) -> bool:
        """True if the R-workers' busy seconds come almost only from attention for decodes."""
        step = self.step
        if step.is_decode:
            return True
        # Most prompt rows per attended KV token at which busy seconds show speeds: storing prompt rows takes time too
        most_prompt_rows = 0.05
        return step.num_prompt_rows <= most_prompt_rows * sum(step.kv_loads) and step.only_decodes_attend

    @cached_property
    def decodes(self) -> bool:
        """True if the step had rows and all were decodes.

        A step without rows only samples the first tokens of prompts from prefill workers.
        """
        return self.step.is_decode and self.step.num_tokens > 0


class Observer(Protocol):
    """A part of the scheduler that learns from the duration of steps."""

    def observe(self, observed: Observed) -> None:
        """Learn from the times of the step ``observed``."""


class Decayed:
    """Decaying sums of observed values: float64 [num_sums], or [num_sums, n] for n things observed separately.
    ``kept``: the factor by which each observation reduces the weight of all earlier ones. About the last 1 / (1 - kept)
    observations count. A mean is the ratio of two sums.
    """

    def __init__(self, kept: float, *shape: int) -> None:
        self.kept = kept
        self.sums = np.zeros(shape)

    def add(self, *values: Any, where: np.ndarray | None = None) -> None:
        """Add one of ``values`` to each sum. ``where``, bool [n]: which of n things were observed; None for all."""
        if where is None:
            self.sums = self.kept * self.sums + values
        else:
            self.sums = np.where(where, self.kept * self.sums + values, self.sums)

    def ratio(self, top: int, bottom: int, least: float = 1e-300) -> float:
        """Return sum ``top`` divided by sum ``bottom``, or by ``least`` if that is larger."""
        return float(self.sums[top] / max(self.sums[bottom], least))

    def resize(self, num_things: int) -> None:
        """Resize the sums to ``num_things`` things; new things have no observations."""
        self.sums = np.pad(self.sums, ((0, 0), (0, num_things - self.sums.shape[1])))

    def forget(self, thing: int) -> None:
        """Drop all observations of ``thing``."""
        self.sums[:, thing] = 0.0


KEPT = 0.95
"""Weight of the past after another step: about the last 20 steps count."""

LEAST_SECONDS = 0.05
"""Least decayed busy seconds that show an R-worker's speed. Shorter times are mostly fixed costs and noise."""

NUM_STEPS = 3
"""Consecutive steps, all faster or all slower than usual, after which the old speed is dropped."""


class Speeds:
    """Each R-worker's speed, attended KV tokens per busy second, from decaying sums that restart when it changes.
    A bandwidth measured at the start is not enough: later, R-workers may share cores with each other or with other
    programs, which busy seconds show. ``bandwidths``: each R-worker's memory bandwidth at its start, in any unit,
    float64 [num_workers].
    """

    def __init__(self, bandwidths: Sequence[float]) -> None:
        self.bandwidths = np.array(bandwidths, np.float64)
        self._usual = Decayed(KEPT, 2, len(bandwidths))  # the two sums: KV tokens, and busy seconds
        self._new = np.zeros((2, len(bandwidths)))
        self._ways = np.zeros(len(bandwidths), np.int64)

    @property
    def lasting(self) -> np.ndarray:
        """Speeds for decisions that last many steps: float64 [num_workers], in any common unit.
        They are the bandwidths while the measured speeds agree with these within ``tolerance``. For an R-worker that
        has never attended, its bandwidth is used.
        """
        tokens, seconds = self._usual.sums
        seen = seconds >= LEAST_SECONDS
        surprise = tokens[seen] / seconds[seen] / self.bandwidths[seen]
        # Speeds agree with bandwidths if their ratios differ by at most this factor, so that placement does not follow
        # noise
        tolerance = 1.2
        if not len(surprise) or surprise.max() <= tolerance * surprise.min():
            return self.bandwidths
        speeds = np.where(seen, tokens / np.where(seen, seconds, 1.0), 0.0)
        return np.where(seen, speeds, self.bandwidths * speeds.sum() / self.bandwidths[seen].sum())

    @property
    def relative_times(self) -> np.ndarray:
        """Each R-worker's time per KV token, relative to an R-worker of mean speed; float64 [num_workers]."""
        speeds = self.lasting
        return speeds.sum() / len(speeds) / np.maximum(speeds, 1e-300)

    def latest(self, present: Sequence[int]) -> np.ndarray:
        """Return speeds for decisions that the next step can revert: float64 [num_workers], all above 0, in any unit.
        They equal ``lasting`` until every R-worker in ``present`` has attended.
        """
        tokens, seconds = self._usual.sums
        if (seconds[list(present)] < LEAST_SECONDS).any():
            return np.maximum(self.lasting, 1e-300)
        return np.maximum(np.where(seconds > 0, tokens / np.maximum(seconds, 1e-300), 0.0), 1e-300)

    def observe(self, kv_loads: Sequence[int], r_seconds: Sequence[float]) -> None:
        """Learn from one decode step: attended KV tokens and busy seconds of each R-worker."""
        if len(r_seconds) == 1:  # an R-worker that is compared with no other
            if r_seconds[0] > 0:
                self._usual.add(kv_loads, r_seconds)
            return
        step = np.array([kv_loads, r_seconds], np.float64)
        tokens, seconds = step
        # An R-worker attends too little to show its speed if it has less than this fraction of the longest busy time
        # and of the largest load
        at_work = 0.25
        seen = (seconds >= at_work * seconds.max()) | (tokens >= at_work * tokens.max())
        seen &= seconds > 0
        self._note_changes(step, seen & (tokens > 0))
        self._usual.add(tokens, seconds, where=seen)
        if np.abs(self._ways).max() >= NUM_STEPS:
            changed = (np.abs(self._ways) >= NUM_STEPS) & (self._new[1] >= LEAST_SECONDS)
            self._usual.sums[:, changed] = self._new[:, changed]
            self._ways[changed] = 0

    def join(self, index: int, bandwidth: float) -> None:
        """Add R-worker ``index``, new or vacant, without observations."""
        if index == len(self.bandwidths):
            self.bandwidths, self._ways = np.append(self.bandwidths, 0.0), np.append(self._ways, 0)
            self._usual.resize(index + 1)
            self._new = np.pad(self._new, ((0, 0), (0, 1)))
        self.bandwidths[index], self._ways[index] = bandwidth, 0
        self._usual.forget(index)
        self._new[:, index] = 0.0

    def _note_changes(self, step: np.ndarray, seen: np.ndarray) -> None:
        """Count in how many consecutive steps each R-worker was faster than usual (above 0) or slower (below 0).
        Sum the KV tokens and busy seconds of these steps. A slowdown that all R-workers share is not counted.
        """
        tokens, seconds = self._usual.sums
        compared = seen & (seconds >= LEAST_SECONDS) & (tokens > 0)
        if not compared.any():
            return
        speeds, usual = step[0, compared] / step[1, compared], tokens[compared] / seconds[compared]
        ratios = speeds / usual
        ratios /= _median(ratios)
        # A change of an R-worker's speed, relative to the others, may be real if it exceeds this factor
        changed = 1.2
        # no R-worker's speed has changed, or there is only one R-worker
        if ratios.max() <= changed and ratios.min() >= 1 / changed:
            self._new[:], self._ways[:] = 0.0, 0
            return
        way = np.zeros_like(self._ways)
        way[compared] = (ratios > changed).astype(np.int64) - (ratios < 1 / changed)
        goes_on = self._ways * way > 0
        self._new = self._new * goes_on + step * (way != 0)
        self._ways = self._ways * goes_on + way


def _median(values: np.ndarray) -> float:
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
