"""Timing that holds on a machine whose speed drifts, and straight lines through what was timed.

What is measured stands beside an anchor, measured in turns. Nothing here knows what it times: it is handed callables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

MOST_DRIFT = 0.05
"""An anchor that moved by more than this part during a measurement spoils it."""


@dataclass(frozen=True)
class Measured:
    """Median seconds, and from the 10th to the 90th percentile over the median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Steadied:
    """Samples taken between two looks at the anchor. ``drift``: how many times as slow as its reference it was;
    ``moved``: by which part the two differ. ``tries``: times it was taken."""

    samples: np.ndarray
    drift: float
    moved: float
    tries: int

    def measured(self, column: int) -> Measured:
        """Return one column as it would have been at the reference's speed."""
        return summary(self.samples[:, column] / self.drift)


@dataclass(frozen=True)
class Anchor:
    """One short shape that says how fast the machine is: ``reference_seconds`` when all began."""

    call: Callable[[], float]
    reference_seconds: float

    @staticmethod
    def of(call: Callable[[], float], times: int = 3) -> Anchor:
        """Its reference is the median of some calls."""
        return Anchor(call, float(np.median([call() for _ in range(times)])))

    def averaged(self, times: int) -> Anchor:
        """Measure as ``steadily`` does, each look the median of so many; it pays for what takes long enough."""
        return replace(self, call=lambda: float(np.median([self.call() for _ in range(times)])))

    def drift(self) -> float:
        """Return times as slow as the reference, now."""
        return self.call() / self.reference_seconds


def steadily(anchors: Sequence[Anchor], sample: Callable[[], np.ndarray], most_tries: int = 3) -> list[Steadied]:
    """``sample``'s rows, [num_samples, num_columns], between looks at the anchors: one answer per anchor, and one of
    drift 1 where there is none.

    Taken again, up to ``most_tries`` times, while an anchor moved by more than ``MOST_DRIFT`` meanwhile; the steadiest
    try counts.
    """
    if not anchors:
        return [Steadied(sample(), 1.0, 0.0, 1)]
    best: list[Steadied] = []
    before = [anchor.drift() for anchor in anchors]
    for tries in range(1, most_tries + 1):
        best = [replace(each, tries=tries) for each in best]
        samples = sample()
        after = [anchor.drift() for anchor in anchors]
        found = [
            Steadied(samples, (first + last) / 2, abs(last / first - 1.0), tries)
            for first, last in zip(before, after, strict=True)
        ]
        if not best or most_moved(found) < most_moved(best):
            best = found
        if most_moved(best) <= MOST_DRIFT:
            break
        before = after
    return best


def summary(seconds: np.ndarray) -> Measured:
    """Return the median and spread of samples."""
    low, median, high = np.quantile(seconds, (0.1, 0.5, 0.9))
    return Measured(float(median), float((high - low) / abs(median)) if median else 0.0)


def most_moved(found: Sequence[Steadied]) -> float:
    """Return by which part the least steady of the anchors moved."""
    return max(each.moved for each in found)


def fit_parts(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return weights of ``columns``, float64 [num_columns] and none below zero, whose sum comes closest to ``seconds``.

    ``columns``: float64 [num_points, num_columns], the first of which always counts; ``seconds``: float64 [num_points],
    above zero. Closest means the least squares of relative errors. With few columns every set of them can be tried; of
    sets that fit alike the smaller one is taken, so that one point is enough for one part.
    """
    num_points, num_columns = columns.shape
    relative = columns / seconds[:, None]
    best, least = np.zeros(num_columns), np.inf
    for size in range(1, min(num_points, num_columns) + 1):
        for others in itertools.combinations(range(1, num_columns), size - 1):
            chosen = [0, *others]
            weights, _, rank, _ = np.linalg.lstsq(relative[:, chosen], np.ones(num_points), rcond=None)
            error = float(np.sum((relative[:, chosen] @ weights - 1.0) ** 2))
            if rank == size and np.all(weights >= 0) and weights[0] > 0 and error < least * 0.99 - 1e-12:
                best, least = np.zeros(num_columns), error
                best[chosen] = weights
    return best
