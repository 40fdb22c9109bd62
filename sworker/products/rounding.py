"""Rounds the weight of a linear layer so that its errors cancel out on calibrating rows: coordinate descent in integers.

The second moments of a layer's int8 rows are integers. So are the weights, in small fractions of their scales. Every sum
below is an integer under 2**53, which float64 holds exactly. So the result depends neither on the order of a sum, nor
on the number of threads, nor on the instruction set.
"""

from __future__ import annotations

import math

import torch

from fastdecode.sworker.products.codes import IntegerCodes, rotated

SWEEPS = 4
"""How often each code is chosen anew. Later sweeps change few codes."""

FARTHEST = 8
"""Most steps between a code and the nearest one. This bounds all sums."""

BLOCK = 128
"""Number of inputs whose codes are chosen one after another before the other inputs hear of them."""


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
    """Replace the numbers of ``codes``, in place, by others whose errors cancel out under ``moments``.

    ``weight`` [outputs, inputs]: what the codes represent, unrounded. ``num_outputs``: outputs that are rounded together.
    """
    parts = zip(codes.codes.split(num_outputs), codes.scales.split(num_outputs), weight.split(num_outputs), strict=True)
    for own, scales, part in parts:
        exact = rotated(part.detach().double(), codes.block) / scales.double()[:, None]
        own.copy_(descended(exact, own, moments))


def descended(exact: torch.Tensor, nearest: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Return int8 codes q for which (exact - q) ``moments`` (exact - q) is small in each row.

    ``exact`` [outputs, inputs], float64: unrounded codes. ``nearest``: int8 codes near them, where the descent starts.
    """
    unit = float(1 << fraction_bits(moments))
    codes = nearest.double() * unit
    gradient = (torch.round(exact * unit) - codes) @ moments
    least, most = ((nearest.double() + move).clamp_(-127, 127) for move in (-FARTHEST, FARTHEST))
    for _ in range(SWEEPS):
        for start in range(0, len(moments), BLOCK):
            block = slice(start, start + BLOCK)
            before = codes[:, block].clone()
            limits = least[:, block].T.contiguous(), most[:, block].T.contiguous()
            _descend(codes[:, block], gradient[:, block], moments[block, block], limits, unit)
            gradient -= (codes[:, block] - before) @ moments[block]
    return (codes / unit).to(torch.int8)


def fraction_bits(moments: torch.Tensor) -> int:
    """Return how many binary digits weights get after the point, so that no sum exceeds 2**53: at most ten."""
    # A code and its weight are fewer than 2 * FARTHEST steps apart, and so are two codes; no moment exceeds the largest
    # of the diagonal
    largest = 2 * FARTHEST * (len(moments) + BLOCK) * int(moments.diagonal().max())
    return max(0, min(10, 53 - math.ceil(math.log2(largest + 1))))


def _descend(
    codes: torch.Tensor, gradient: torch.Tensor, moments: torch.Tensor, limits: tuple[torch.Tensor, ...], unit: float
) -> None:
    """Choose the codes of one block of inputs one after another; write them to ``codes``, a view [outputs, inputs].

    Codes and gradients are in fractions of a step: ``unit`` is a whole step. ``limits``: least and most, in steps.
    """
    by_input, slopes = codes.T.contiguous(), gradient.T.contiguous()
    for index, (least, most) in enumerate(zip(*limits, strict=True)):
        best = (by_input[index] + slopes[index] / moments[index, index]) / unit
        chosen = best.round_().clamp_(least, most).mul_(unit)
        slopes.addr_(moments[index], chosen - by_input[index], alpha=-1)
        by_input[index] = chosen
    codes.copy_(by_input.T)
