"""The barrier of a layer: each mini-batch waits for the slowest of its R-workers (closed form: arXiv 2601.21351).

Sequences of random ages lie on R-workers at random. One R-worker's load in a mini-batch is a sum of n contexts, so it
is nearly normal, with a spread of s / sqrt(n) of its mean, where s is the spread of one context over its mean. The
largest of P such loads exceeds the mean by E[max of P normals] times that spread. A scheduler that looks ahead when it
places sequences does better, and the simulator shows by how much; a plan does not count on it.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from fastdecode.perfmodel.sizing import Workload

BLOM = 0.375
"""Blom's constant: the quantile (P - a) / (P - 2a + 1) of a normal is near the expected largest of P normals."""


def expected_largest(number: float) -> float:
    """Return the expected largest of ``number`` standard normal values: 0 for one, 1.42 for eight."""
    number = max(number, 1.0)
    return NormalDist().inv_cdf((number - BLOM) / (number - 2.0 * BLOM + 1.0))


def context_spread(workload: Workload) -> float:
    """Return the standard deviation of a running sequence's context over its mean.

    An output of length o is seen at an age that is uniform over it, and long outputs are seen for longer. With
    gamma-distributed lengths E[age] = o(1 + v)/2 and E[age^2] = o^2(1 + v)(1 + 2v)/3, where v is the square of
    ``output_len_cv``.
    """
    squared = workload.output_len_cv**2
    mean = (1.0 + squared) / 2.0
    variance = (1.0 + squared) * (1.0 + 2.0 * squared) / 3.0 - mean**2
    return workload.output_len * math.sqrt(variance) / workload.mean_context


def barrier(num_r_workers: float, sequences_each: float, spread: float) -> float:
    """Return how many times the mean load the largest load of ``num_r_workers`` R-workers is.

    ``sequences_each``: sequences, or ranges of them, of one mini-batch on one R-worker in the mean. Where there are
    fewer than one, some R-workers have one and others none.
    """
    if num_r_workers <= 1 or sequences_each <= 0:
        return 1.0
    largest = 1.0 + expected_largest(num_r_workers) * spread / math.sqrt(max(sequences_each, 1.0))
    return largest * max(1.0, 1.0 / sequences_each)
