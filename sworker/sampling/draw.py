"""Random draws that are a pure function of (seed, position, the row's probabilities): no state, no other rows.

A counter-based generator (splitmix64's finalizer, Steele et al. 2014) gives each row one uniform number, and the token
is found by inverting the cumulative distribution. Sums run over integers: they are exact in any order, so the result
does not depend on how many rows are scanned together or on threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

WEIGHT_BITS = 50
"""Probabilities become integers in units of 2**-50: their sum stays below 2**53, so it is exact in float64 too."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def sample_seed(request_seed: int, sample_index: int) -> int:
    """The ``generator_seed`` of sample ``sample_index`` (from 0) of a request with this seed: 64 bits, unsigned."""
    first = _mix(np.array([request_seed & _MASK], dtype=np.uint64))
    return int(first[0]) ^ (sample_index * _GOLDEN & _MASK)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per row: float64 [num_rows], from 64-bit seeds and non-negative positions."""
    stream = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    counter = (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix(stream + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integer_weights(probs: Tensor) -> Tensor:
    """Probabilities, float32 [num_rows, vocab], as int64 in units of 2**-50."""
    return (probs * 2.0**WEIGHT_BITS).to(torch.int64)


def draw(probs: Tensor, uniforms: np.ndarray) -> Tensor:
    """Invert each row's cumulative distribution, in token order.

    ``probs``: float32 [num_rows, vocab], each row summing to about 1; ``uniforms``: float64 [num_rows] in [0, 1).
    Returns int64 [num_rows]; a token of probability 0 is never returned.
    """
    cumulative = integer_weights(probs).cumsum(-1)
    total = cumulative[:, -1:].double()
    # A float64 below 1 times the total rounds to less than the total, so a token with weight is always found.
    target = (torch.from_numpy(uniforms).to(probs.device)[:, None] * total).to(torch.int64)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _mix(state: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, a bijection of uint64 that changes about half of all bits for any changed bit."""
    state = state + np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))
