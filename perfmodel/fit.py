"""Straight lines through timings: seconds as a sum of parts that are never negative."""

from __future__ import annotations

import itertools

import numpy as np


def fit_parts(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Weights of ``columns``, float64 [num_columns] and none below zero, whose sum comes closest to ``seconds``.

    ``columns``: float64 [num_points, num_columns], the first of which always counts; ``seconds``: float64
    [num_points], above zero. Closest means the least squares of relative errors. With few columns every set of them
    can be tried; of sets that fit alike the smaller one is taken, so that one point is enough for one part.
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
