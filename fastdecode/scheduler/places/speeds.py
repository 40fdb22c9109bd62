"""How long steps took, sums that forget, and how fast each R-worker attends by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fastdecode.core.step import ScheduledStep


@dataclass(frozen=True)
class Observed:
    """Seconds of one step: the S-worker's own, those it waited for R-workers, and busy ones of each R-worker."""

    step: ScheduledStep
    s_seconds: float
    wait_seconds: float
    r_seconds: Sequence[float]

    @cached_property
    def shows_speeds(self) -> bool:
        """True if the R-workers did little else than attend for decodes."""
        step = self.step
        if step.is_decode:
            return True
        # The most rows of prompts, as a part of the KV tokens attended: more rows of prompts, which R-workers store,
        # would count as slowness
        most_prompt_rows = 0.05
        return step.num_prompt_rows <= most_prompt_rows * sum(step.kv_loads) and step.only_decodes_attend

    @cached_property
    def decodes(self) -> bool:
        """True if the step had rows, all of them decodes; a step may only sample first tokens of arrived prompts."""
        return self.step.is_decode and self.step.num_tokens > 0


class Observer(Protocol):
    """A part of the scheduler that learns from how long steps take."""

    def observe(self, observed: Observed) -> None:
        """One more step has ended."""


class Decayed:
    """Sums of observed values, float64 [num_sums], or [num_sums, n] of n things that are observed one by one.

    ``kept``: the part of a sum that counts after one more observation. About the last 1 / (1 - kept) observations
    count, and the ratio of two sums is a mean over them.
    """

    def __init__(self, kept: float, *shape: int) -> None:
        self.kept = kept
        self.sums = np.zeros(shape)

    def add(self, *values: Any, where: np.ndarray | None = None) -> None:
        """Observe a value of each sum; ``where``, bool [n], says which of n things were observed, else all of them."""
        if where is None:
            self.sums = self.kept * self.sums + values
        else:
            self.sums = np.where(where, self.kept * self.sums + values, self.sums)

    def ratio(self, top: int, bottom: int, least: float = 1e-300) -> float:
        """Return one sum over another, or over ``least`` where that is more."""
        return float(self.sums[top] / max(self.sums[bottom], least))

    def resize(self, num_things: int) -> None:
        """Make room for ``num_things`` things, of which new ones were not observed yet."""
        self.sums = np.pad(self.sums, ((0, 0), (0, num_things - self.sums.shape[1])))

    def forget(self, thing: int) -> None:
        """Count nothing that was observed of ``thing``."""
        self.sums[:, thing] = 0.0


KEPT = 0.95
"""The part of the past that counts after another step: about the last 20 steps do."""

LEAST_SECONDS = 0.05
"""Busy time, among what counts of the past, that it takes to say anything: shorter calls are fixed costs and chance."""


NUM_STEPS = 3
"""One after the other in which it is, the same way, before what was usual is forgotten."""


class Speeds:
    """The decayed sum of what each R-worker attended, over the time that it took; a change forgets the sum.

    A start cannot show which R-workers will share cores: two on one core, one with twice the other's weight, or a
    neighbour that comes and goes. Busy seconds hold what the others took.

    ``bandwidths``: what memory gave each at its start, in any unit, float64 [num_workers].
    """

    def __init__(self, bandwidths: Sequence[float]) -> None:
        self.bandwidths = np.array(bandwidths, np.float64)
        self._usual = Decayed(KEPT, 2, len(bandwidths))  # KV tokens, busy seconds
        self._new = np.zeros((2, len(bandwidths)))
        self._ways = np.zeros(len(bandwidths), np.int64)

    @property
    def lasting(self) -> np.ndarray:
        """For what outlasts many steps: float64 [num_workers], in any one unit; as memory was while all are as expected
        within ``tolerance``. An R-worker that was never seen at work counts in proportion to its bandwidth."""
        tokens, seconds = self._usual.sums
        seen = seconds >= LEAST_SECONDS
        surprise = tokens[seen] / seconds[seen] / self.bandwidths[seen]
        # Speeds whose proportions are as expected within this factor count as expected: placement does not follow
        # chance
        tolerance = 1.2
        if not len(surprise) or surprise.max() <= tolerance * surprise.min():
            return self.bandwidths
        speeds = np.where(seen, tokens / np.where(seen, seconds, 1.0), 0.0)
        return np.where(seen, speeds, self.bandwidths * speeds.sum() / self.bandwidths[seen].sum())

    @property
    def relative_times(self) -> np.ndarray:
        """The time that attending takes each beside one of mean speed; float64 [num_workers]."""
        speeds = self.lasting
        return speeds.sum() / len(speeds) / np.maximum(speeds, 1e-300)

    def latest(self, present: Sequence[int]) -> np.ndarray:
        """For what costs nothing to take back: float64 [num_workers], in any one unit, none of them 0; as ``lasting``
        while some of the R-workers ``present`` were hardly seen at work."""
        tokens, seconds = self._usual.sums
        if (seconds[list(present)] < LEAST_SECONDS).any():
            return np.maximum(self.lasting, 1e-300)
        return np.maximum(np.where(seconds > 0, tokens / np.maximum(seconds, 1e-300), 0.0), 1e-300)

    def observe(self, kv_loads: Sequence[int], r_seconds: Sequence[float]) -> None:
        """One decode step: KV tokens attended and busy seconds of each R-worker."""
        step = np.array([kv_loads, r_seconds], np.float64)
        tokens, seconds = step
        # An R-worker busy for less than this part of the busiest one's time, over less than this part of the most
        # loaded one's tokens, tells too little about itself
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
        """R-worker ``index``, the next one or in the place of one that is gone, was never seen at work."""
        if index == len(self.bandwidths):
            self.bandwidths, self._ways = np.append(self.bandwidths, 0.0), np.append(self._ways, 0)
            self._usual.resize(index + 1)
            self._new = np.pad(self._new, ((0, 0), (0, 1)))
        self.bandwidths[index], self._ways[index] = bandwidth, 0
        self._usual.forget(index)
        self._new[:, index] = 0.0

    def _note_changes(self, step: np.ndarray, seen: np.ndarray) -> None:
        """Count for how many steps each R-worker has been faster (above 0) or slower (below) than usual, and sum these
        up. What slows all alike is no change."""
        tokens, seconds = self._usual.sums
        compared = seen & (seconds >= LEAST_SECONDS) & (tokens > 0)
        if not compared.any():
            return
        speeds, usual = step[0, compared] / step[1, compared], tokens[compared] / seconds[compared]
        ratios = speeds / usual
        ratios /= _median(ratios)
        # An R-worker that is off its usual speed by more than this factor, beside the others, may have changed
        changed = 1.2
        if ratios.max() <= changed and ratios.min() >= 1 / changed:  # as usual, or alone: beside itself it is as ever
            self._new[:], self._ways[:] = 0.0, 0
            return
        way = np.zeros_like(self._ways)
        way[compared] = (ratios > changed).astype(np.int64) - (ratios < 1 / changed)
        goes_on = self._ways * way > 0
        self._new = self._new * goes_on + step * (way != 0)
        self._ways = self._ways * goes_on + way


def _median(values: np.ndarray) -> float:
    """``np.median`` of a few numbers, float64 [n], in a tenth of its time."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
