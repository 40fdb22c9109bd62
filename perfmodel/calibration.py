"""Times calls on a machine whose speed drifts, and fits straight lines through the results.

Before and after each measurement it times an anchor: the same short call each time, whose duration shows how fast the
machine is at that moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

MOST_DRIFT = 0.05
"""Largest relative change of an anchor's time during a usable measurement."""


@dataclass(frozen=True)
class Measured:
    """A measured time: its median, and ``spread``: the 90th minus the 10th percentile, divided by the median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Steadied:
    """Samples, and how the machine's speed changed while they were taken.
    ``drift``: how many times slower the machine was than at the start, by an ``Anchor`` timed before and after the
    samples. ``moved``: relative difference of these two times. ``tries``: how often the samples were taken.
    """

    samples: np.ndarray
    drift: float
    moved: float
    tries: int

    def measured(self, column: int) -> Measured:
        """Return median and spread of the samples' ``column``, corrected for the machine's ``drift``."""
        return summary(self.samples[:, column] / self.drift)


@dataclass(frozen=True)
class Anchor:
    """A short call whose time shows the machine's speed. ``reference_seconds``: the time before all measurements."""

    call: Callable[[], float]
    reference_seconds: float

    @staticmethod
    def of(call: Callable[[], float], times: int = 3) -> Anchor:
        """Make an anchor of ``call``, which returns its seconds; the median of ``times`` calls is the reference."""
        return Anchor(call, float(np.median([call() for _ in range(times)])))

    def averaged(self, times: int) -> Anchor:
        """Return an anchor whose ``call`` is timed ``times`` times instead of once, and gives the median."""
        return replace(self, call=lambda: float(np.median([self.call() for _ in range(times)])))

    def drift(self) -> float:
        """Run the call now; return how many times longer it took than ``reference_seconds``."""
        return self.call() / self.reference_seconds


def steadily(anchors: Sequence[Anchor], sample: Callable[[], np.ndarray], most_tries: int = 3) -> list[Steadied]:
    """Call ``sample`` between two timings of each anchor; return its samples once per anchor, with that anchor's drift.
    If an anchor's time changes by more than ``MOST_DRIFT``, call ``sample`` again, up to ``most_tries`` times, and keep
    the result with the least change. Samples: [num_samples, num_columns]. Without anchors, return one entry of drift 1.
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
    """Return the largest relative change of an anchor's time (``Steadied.moved``) in ``found``."""
    return max(each.moved for each in found)


def fit_parts(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return weights of at least 0, float64 [num_columns], for which ``columns @ weights`` is nearest to ``seconds``.

    ``columns``: float64 [num_points, num_columns]. ``seconds``: float64 [num_points], above zero. The fit minimizes the
    sum of squared relative errors. It tries every subset of columns that contains the first column, and sets the other
    columns' weights to 0. Of equally good subsets the smallest wins, so a single point yields the first weight alone.
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
