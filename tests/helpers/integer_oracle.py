"""Products of int8 codes in plain torch. The C++ kernels must equal them bit by bit."""

from __future__ import annotations

from typing import Any

import torch

from fastdecode import _sworker
from fastdecode.sworker.products.codes import quantized
from fastdecode.sworker.products.kernels import array

ROUNDER = 12582912.0
LEAST_PEAK = 1e-30


def weights_of(weight: torch.Tensor, bias: torch.Tensor | None, block: int) -> Any:
    """Return ``weight`` [columns, width], quantized and packed."""
    codes = quantized(weight, block)
    own_bias = None if bias is None else bias.float().numpy()
    return _sworker.IntegerWeights(codes.codes.numpy(), codes.scales.numpy(), own_bias, block, 1)


def product(weights: Any, x: torch.Tensor, columns: int, isa: str, threads: int = 1, kind: str = "none") -> Any:
    """Return the kernels' product of rows ``x`` and packed ``weights``."""
    out = torch.empty(len(x), columns, dtype=x.dtype)
    weights.multiply(array(x), array(out), kind, isa, threads)
    return out


def rotated(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Return rows after butterflies in float32, neighbors first, then reflections over 3, 5 and 7 parts."""
    apart, part = 1, block & -block
    while apart < part:
        pairs = rows.unflatten(-1, (-1, 2, apart))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rows = torch.stack((first + second, first - second), -2).flatten(-3)
        apart *= 2
    for factor in (3, 5, 7):
        while block // apart % factor == 0:
            parts = rows.unflatten(-1, (-1, factor, apart))
            total = sum(parts[..., index, :] for index in range(factor)) * torch.tensor(2 / factor)
            rows = (total[..., None, :] - parts).flatten(-3)
            apart *= factor
    return rows


def codes_and_scales(rows: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers from -127 to 127 as float64 [rows, width], and float32 scales [rows]."""
    mixed = rotated(rows.float(), block)
    peaks = mixed.abs().amax(-1)
    small = peaks < LEAST_PEAK
    inverse = torch.where(small, torch.zeros(()), torch.tensor(127.0) / peaks)
    scales = torch.where(small, torch.zeros(()), peaks / torch.tensor(127.0))
    return (mixed * inverse[:, None]).round().double(), scales


def multiplied(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows [rows, inputs] times the quantized ``weight`` [outputs, inputs], in ``dtype``."""
    codes, scales = codes_and_scales(rows, block)
    weight_codes, weight_scales = codes_and_scales(weight, block)
    sums = (codes @ weight_codes.T).float()  # exact in float64, rounded once
    product = sums * (weight_scales / (block & -block)) * scales[:, None]
    return (product if bias is None else product + bias.float()).to(dtype)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """Return the kernels' polynomial approximation of exp(x)."""
    x = x.clamp(-87.0, 87.0)
    shifted = x * 1.44269504 + ROUNDER
    whole = shifted - ROUNDER
    rest = (x - whole * 0.693359375) - whole * -2.12194440e-4
    power = torch.full_like(x, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        power = power * rest + factor
    power = power * rest * rest + rest + 1.0
    return power * torch.exp2(whole.double()).float()


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) · up, rounded to the rows' dtype after each step."""
    x = gate.float()
    if activation == "silu":
        found = x / (1.0 + exponential(-x))
    else:
        z = 0.7978845608 * (x + 0.044715 * x * x * x)
        found = x / (1.0 + exponential(-2.0 * z))
    return (found.to(gate.dtype).float() * up.float()).to(gate.dtype)


def experts_multiplied(self: Any, part: str, ends: torch.Tensor, x: torch.Tensor, activation: str = "") -> torch.Tensor:
    """Return the expected result of ``ExpertProducts._multiplied``."""
    parts, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        codes = self.codes[part][expert]
        rows = gated(*x[begin:end].chunk(2, -1), activation) if activation else x[begin:end]
        integers, scales = codes_and_scales(rows, codes.block)
        weights = torch.from_numpy(self._products[part].experts[expert].unpack()).double()
        factors = codes.scales / (codes.block & -codes.block)
        parts.append(((integers @ weights.T).float() * factors * scales[:, None]).to(x.dtype))
        begin = end
    return torch.cat(parts)


def compute(product: Any, rows: torch.Tensor, activation: str = "none") -> torch.Tensor:
    """Return the expected result of ``IntegerProduct.compute``, from the codes that the product keeps."""
    x = rows.reshape(-1, rows.shape[-1])
    if activation != "none":
        x = gated(*x.chunk(2, -1), activation)
    codes, scales = codes_and_scales(x, product.block)
    weights = torch.from_numpy(product._weights.unpack()).double()
    found = (codes @ weights.T).float() * (product._scales / (product.block & -product.block)) * scales[:, None]
    if product._bias is not None:
        found = found + product._bias
    return found.to(rows.dtype).view(*rows.shape[:-1], -1)


def own_layer(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the result of the decoder layer's own code, for ``LayerInTwoCalls.__call__``."""
    found: torch.Tensor = type(layer._module).forward(layer._module, *args, **kwargs)
    return found
