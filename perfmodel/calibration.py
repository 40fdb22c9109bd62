"""Times calls on a machine whose speed drifts, and fits straight lines through the results.

Each measurement alternates with an anchor, a short call that shows the machine's present speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

MOST_DRIFT = 0.05
"""Relative change of an anchor during a measurement that makes the measurement unusable."""


@dataclass(frozen=True)
class Measured:
    """A measured time: its median, and ``spread``: the 90th minus the 10th percentile, divided by the median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Steadied:
    """Samples, and how the machine's speed changed while they were taken.
    ``drift``: the anchor's mean time before and after the samples, divided by its reference time. ``moved``: the
    relative change of the anchor's time from before the samples to after them. ``tries``: how often the samples were
    taken.
    """

    samples: np.ndarray
    drift: float
    moved: float
    tries: int

    def measured(self, column: int) -> Measured:
        """Return the median and spread of sample column ``column``, scaled to the anchor's reference speed."""
        return summary(self.samples[:, column] / self.drift)


@dataclass(frozen=True)
class Anchor:
    """A short call whose time shows the machine's speed. ``reference_seconds``: its time before all measurements."""

    call: Callable[[], float]
    reference_seconds: float

    @staticmethod
    def of(call: Callable[[], float], times: int = 3) -> Anchor:
        """Return an anchor whose reference is the median time of ``times`` calls of ``call``."""
        return Anchor(call, float(np.median([call() for _ in range(times)])))

    def averaged(self, times: int) -> Anchor:
        """Return an anchor that takes the median of ``times`` calls at each timing, for longer measurements."""
        return replace(self, call=lambda: float(np.median([self.call() for _ in range(times)])))

    def drift(self) -> float:
        """Time the call now; return its seconds divided by ``reference_seconds``."""
        return self.call() / self.reference_seconds


def steadily(anchors: Sequence[Anchor], sample: Callable[[], np.ndarray], most_tries: int = 3) -> list[Steadied]:
    """Return the rows of ``sample``, [num_samples, num_columns], taken between two timings of each anchor.
    The result has one entry per anchor; without anchors, one entry with drift 1. If an anchor's time changes by more
    than ``MOST_DRIFT``, the samples are taken again, up to ``most_tries`` times. The try with the least change is
    returned.
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
    """Return the median and spread of the samples ``seconds``."""
    low, median, high = np.quantile(seconds, (0.1, 0.5, 0.9))
    return Measured(float(median), float((high - low) / abs(median)) if median else 0.0)


def most_moved(found: Sequence[Steadied]) -> float:
    """Return the largest ``moved`` in ``found``, that is, the largest change of any anchor's time."""
    return max(each.moved for each in found)


def fit_parts(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return weights, float64 [num_columns] and not negative, with which ``columns`` add up to ``seconds`` best.

    ``columns``: float64 [num_points, num_columns]. ``seconds``: float64 [num_points], above zero. The fit minimizes the
    squares of relative errors. It tries every subset of columns that contains the first column; of equally good subsets
    the smallest wins. Thus one point is enough to find one weight.
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
