"""Rounds the weight of a linear layer so that its errors cancel out on calibrating rows: integer coordinate descent.

The second moments of a layer's int8 rows are integers. So are the weights, in small fractions of their scales. Every
sum is an integer below 2**53, which float64 holds exactly. So the result depends neither on the order of a sum, nor on
the number of threads, nor on the instruction set.
"""

from __future__ import annotations

import math

import torch

from fastdecode import _sworker
from fastdecode.sworker.products.codes import IntegerCodes, rotated

SWEEPS = 4
"""The number of times that the descent visits each code. Later sweeps change few codes."""

FARTHEST = 8
"""Most steps between a code and the nearest one. This bounds all sums."""


def moments_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the damped second moments of int8 rows ``codes`` [rows, inputs]: float64 integers [inputs, inputs].

    Three tenths of the mean are added to the diagonal, since texts differ from the calibrating rows.
    """
    rows = codes.double()
    moments = rows.T @ rows
    total = int(moments.diagonal().sum())
    moments.diagonal().add_(3 * total // (10 * len(moments)) + 1)
    return moments


def round_again(codes: IntegerCodes, weight: torch.Tensor, moments: torch.Tensor, num_outputs: int = 1024) -> None:
    """Replace the int8 weights in ``codes``, in place, by weights whose errors cancel out under ``moments``.

    ``weight`` [outputs, inputs]: the unrounded weight. ``num_outputs``: outputs rounded at a time.
    """
    parts = zip(codes.codes.split(num_outputs), codes.scales.split(num_outputs), weight.split(num_outputs), strict=True)
    for own, scales, part in parts:
        steps = scales.double()[:, None]
        exact = rotated(part.detach().double(), codes.block) / steps.where(steps > 0, 1.0)  # 0: weights are all zero
        descend(exact.nan_to_num_(0.0, 0.0, 0.0), own, moments)


def descend(exact: torch.Tensor, codes: torch.Tensor, moments: torch.Tensor, isa: str = "auto") -> None:
    """Change int8 ``codes`` so that errors * ``moments`` * errors falls in each row.

    ``exact`` [outputs, inputs], float64: the unrounded codes. ``codes``: the integers nearest to them.
    """
    unit = float(1 << fraction_bits(moments))
    gradient = (torch.round(exact * unit) - codes.double() * unit) @ moments
    threads = torch.get_num_threads()
    _sworker.descend(moments.numpy(), gradient.numpy(), codes.numpy(), unit, FARTHEST, SWEEPS, threads, isa)


def fraction_bits(moments: torch.Tensor) -> int:
    """Return how many binary digits weights get after the point, so that no sum exceeds 2**53: at most ten."""
    # A code and its weight are fewer than 2 * FARTHEST steps apart, and so are two codes; no moment exceeds the largest
    # of the diagonal
    largest = 2 * FARTHEST * (len(moments) + 1) * int(moments.diagonal().max())
    return max(0, min(10, 53 - math.ceil(math.log2(largest + 1))))
