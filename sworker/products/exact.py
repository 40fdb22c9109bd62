"""Attention and elementary functions with the same bits on every machine, for the calibrating forward.

Sums add integers. Every other step is one float64 operation that IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math

import torch


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention of one sequence, float64 [heads, T, value dim].

    ``query`` is [heads, T, dim]; ``key`` and ``value`` are [KV heads, T, …].
    """
    repeats = len(query) // len(key)
    q, k, v = (_fixed(each, 1 << 10) for each in (query, key, value))
    k, v = (each.repeat_interleave(repeats, 0) for each in (k, v))
    scores = q @ k.transpose(1, 2) * (scale / (1 << 20))
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.round(exponential(scores - scores.amax(-1, keepdim=True)) * (1 << 16))
    return weights @ v / weights.sum(-1, keepdim=True) / (1 << 10)


def _fixed(rows: torch.Tensor, unit: int) -> torch.Tensor:
    """Return ``rows`` in whole numbers of 1 / ``unit``, below 2**20 in size, in float64."""
    most = 1 << 20  # products of two, and sums of 2**12 of them, stay below 2**53
    return torch.round(rows.double() * unit).clamp_(-most, most)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """Return e to the power of ``x``, float64 and not above 0, to about 6 digits."""
    found = _series(x.clamp_min(-16.0).div_(128), [1 / math.factorial(power) for power in range(5)])
    for _ in range(7):
        found.mul_(found)
    return found


def cosine(x: torch.Tensor) -> torch.Tensor:
    """Return the cosine of ``x`` in float64, to about 12 digits if ``x`` is a moderate number."""
    turns = torch.round(x.double() / (2 * math.pi))
    rest = x.double() - turns * (2 * math.pi)
    return _series(rest * rest, [(-1) ** power / math.factorial(2 * power) for power in range(16)])


def _series(x: torch.Tensor, factors: list[float]) -> torch.Tensor:
    """Return the sum of ``factors`` times rising powers of ``x``."""
    found = torch.full_like(x, factors[-1])
    for factor in reversed(factors[:-1]):
        found.mul_(x).add_(factor)
    return found
