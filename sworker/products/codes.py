"""The weight of a linear layer as int8 numbers (codes), before it is cut for ranks and packed for the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fastdecode import _sworker
from fastdecode.core.errors import ConfigError
from fastdecode.sworker.products.kernels import array, as_rows, integer_isa

NAME = "integer_codes"
"""The attribute of a linear layer that holds its codes."""

EXPERTS = "expert_codes"
"""The attribute of an experts' module that holds the codes of each expert, by parameter."""


class Ranks(Protocol):
    """The methods of ``sharding.Rank`` that int8 layers call."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of ``tensor``."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors, in order."""


@dataclass
class IntegerCodes:
    """A weight rotated in blocks of ``block`` inputs and quantized: int8 ``codes`` [outputs, inputs].

    ``scales``: float32 [outputs]. ``rank``: set if this rank has only some of the inputs; then all ranks' integer sums
    are added before they are scaled. ``plain``: the unrounded weight, until a calibration has rounded it again.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: int
    rank: Ranks | None = None
    plain: torch.Tensor | None = None

    def cut_outputs(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``cut`` to the output dimension of codes and scales."""
        self.codes, self.scales = cut(self.codes).contiguous(), cut(self.scales).contiguous()

    def cut_inputs(self, name: str, rank: Ranks) -> None:
        """Keep only the inputs of ``rank``. Raise ConfigError if a block would be on two ranks."""
        width = self.codes.shape[1]
        if width % (rank.size * self.block):
            raise ConfigError(
                f"tensor_parallel_size: with quantization int8, {rank.size} ranks cannot share the {width} inputs of "
                f"{name} in whole blocks of {self.block}"
            )
        self.codes, self.rank = rank.cut(self.codes, 1).contiguous(), rank

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight that the codes represent, [outputs, inputs], in ``dtype``."""
        return unrotated(self.codes.float() * self.scales[:, None], self.block).to(dtype)


def codes_of(linear: torch.nn.Module) -> IntegerCodes | None:
    """Return the int8 weight of the quantized layer ``linear`` before packing; None for any other layer."""
    return linear.__dict__.get(NAME)


def quantized(weight: torch.Tensor, block: int) -> IntegerCodes:
    """Return ``weight`` [outputs, inputs], on the CPU, rotated in blocks of ``block`` inputs and quantized to int8."""
    rows = as_rows(weight.detach())
    codes = torch.empty(rows.shape, dtype=torch.int8)
    scales = torch.empty(len(rows))
    _sworker.quantize(array(rows), block, codes.numpy(), scales.numpy(), integer_isa(), torch.get_num_threads())
    return IntegerCodes(codes, scales, block)


def block_of(width: int, num_heads: int, is_cut: bool) -> int:
    """Return how many neighbouring inputs a rotation mixes, for rows of ``width``: the most that the kernels can.

    ``is_cut``: rows are split among ranks. Each rank then has whole blocks, for any number of ranks that divides heads.
    """
    # Possible numbers of ranks; a block must lie within a rank's part of a row for each of them
    degrees = range(1, 17) if is_cut else (1,)
    common = math.gcd(*(width // degree for degree in degrees if num_heads % degree == 0 and width % degree == 0))
    most = 4096  # most elements of a block
    block = min(common & -common, most)
    # the kernels mix 3, 5 or 7 parts only as whole vectors of 16 elements
    for factor in (3, 5, 7) if block >= 16 else ():
        while common % (block * factor) == 0 and block * factor <= most:
            block *= factor
    return block


def unrotated(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Undo the rotation of ``rows`` [rows, width]. Each of its stages is its own inverse, up to a factor."""
    return rotated(rows, block) / (block & -block)


def rotated(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Return ``rows`` [rows, width] rotated in blocks, in their own dtype, with additions in one fixed order."""
    part = block & -block
    mixed, apart = rows.T.contiguous(), block  # in memory, neighbours then take the same additions
    for factor in (7, 5, 3):
        while apart // part % factor == 0:
            apart //= factor
            parts = mixed.unflatten(0, (-1, factor, apart))
            total = functools.reduce(torch.add, parts.unbind(1)).unsqueeze(1)
            mixed = (total * (2 / factor) - parts).flatten(0, 2)
    apart = 1
    while apart < part:
        first, second = mixed.unflatten(0, (-1, 2, apart)).unbind(1)
        mixed = torch.stack((first + second, first - second), 1).flatten(0, 2)
        apart *= 2
    return mixed.T.contiguous()


def set_codes(linear: Any, codes: IntegerCodes) -> None:
    """Attach ``codes`` to ``linear``."""
    linear.__dict__[NAME] = codes


def expert_codes_of(module: torch.nn.Module, part: str) -> list[IntegerCodes] | None:
    """Return the int8 weights of parameter ``part``, one per expert, before packing; None if it is not quantized."""
    found: dict[str, list[IntegerCodes]] = module.__dict__.get(EXPERTS, {})
    return found.get(part)


def cut_experts(name: str, codes: list[IntegerCodes], style: str, rank: Ranks) -> None:
    """Cut each expert's int8 weight to the part of ``rank``; packed gate and up projections are cut separately."""
    for each in codes:
        if style.endswith("rowwise"):
            each.cut_inputs(name, rank)
            continue

        def cut(whole: torch.Tensor) -> torch.Tensor:
            halves = whole.chunk(2) if style.startswith("packed") else (whole,)
            return torch.cat([rank.cut(half, 0) for half in halves])

        each.cut_outputs(cut)
