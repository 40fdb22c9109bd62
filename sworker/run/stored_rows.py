"""Rounds keys and values as R-workers' caches do, for prompts that torch attends.

R-workers attend over the rows that their caches store, rounded or quantized. Torch must attend over the same numbers.
Otherwise a prompt's tokens would depend on where it attends: on the GPU, or on R-workers after a cached prefix.
"""

from __future__ import annotations

import torch

from fastdecode.core.dtypes import is_quantized
from fastdecode.kinds import Index, Latent, Layer
from fastdecode.sworker.run.staging import TORCH_DTYPE


def as_stored(k: torch.Tensor, v: torch.Tensor, layer: Layer, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [rows, num_kv_heads, …] as a cache of ``kv_dtype`` stores them, in the dtype of ``k``."""
    if isinstance(layer, Index) and is_quantized(kv_dtype):
        kv_dtype = "bfloat16"
    if not is_quantized(kv_dtype):
        dtype = TORCH_DTYPE[kv_dtype]
        return k.to(dtype).to(k.dtype), v.to(dtype).to(v.dtype)
    if isinstance(layer, Latent):
        latents, further = k[..., : layer.value_head_dim], k[..., layer.value_head_dim :]
        return torch.cat((_quantized(latents, kv_dtype, 15), further.to(torch.bfloat16).to(k.dtype)), dim=-1), v
    return _quantized(k, kv_dtype, 31), _quantized(v, kv_dtype, 15)


def _quantized(rows: torch.Tensor, kv_dtype: str, top_code: int) -> torch.Tensor:
    """Return ``rows`` [rows, heads, dim], quantized and dequantized. ``top_code``: the largest int4 number."""
    floats = rows.float()
    if kv_dtype == "int8":
        return _int8(floats).to(rows.dtype)
    groups = _rotated(floats).split(64, dim=-1)  # one scale and one zero point per 64 elements
    return _rotated(torch.cat([_int4(group, top_code) for group in groups], dim=-1)).to(rows.dtype)


def _int8(floats: torch.Tensor) -> torch.Tensor:
    scale = _checked(_divided(floats.abs().amax(dim=-1, keepdim=True), 127))
    return _codes(floats, scale) * scale


def _int4(floats: torch.Tensor, top_code: int) -> torch.Tensor:
    """Return the elements of a quantization group as int4, dequantized.

    The zero point is the group's minimum, rounded down to bfloat16; the scale is rounded to the nearest bfloat16.
    """
    low, high = floats.amin(dim=-1, keepdim=True), floats.amax(dim=-1, keepdim=True)
    bits = low.view(torch.int32)
    zero = ((bits & -65536) + ((bits < 0) & (bits & 0xFFFF != 0)).int() * 65536).view(torch.float32)
    scale = _checked(_divided(high - zero, top_code).to(torch.bfloat16).float())
    return _codes(floats - zero, scale) * scale + zero


def _divided(floats: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return ``floats / divisor``, exactly rounded. On a GPU, torch multiplies by a Python number's reciprocal."""
    return floats / torch.full_like(floats, divisor)


def _checked(scale: torch.Tensor) -> torch.Tensor:
    """Return ``scale`` with subnormal scales as 0 and infinite ones as NaN, as R-workers store them."""
    least = torch.finfo(torch.float32).tiny  # R-workers have the same limit: rworker_cpp/src/kernels/quantize.hpp
    return torch.where(scale < least, 0.0, torch.where(scale.isinf(), torch.nan, scale))


def _codes(floats: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (floats / torch.where(scale == 0, 1.0, scale)).round()


def _rotated(floats: torch.Tensor) -> torch.Tensor:
    """Return each row of ``floats`` times Hadamard matrices: blocks of powers of two, the largest first.

    Sums have the order of rworker_cpp/src/kernels/rotate.hpp, so they have the same bits.
    """
    blocks, first, dim = [], 0, floats.shape[-1]
    while first < dim:
        size = 1 << (dim - first).bit_length() - 1
        block, stride = floats[..., first : first + size], 1
        while stride < size:
            pairs = block.reshape(*floats.shape[:-1], -1, 2, stride)
            a, b = pairs.unbind(dim=-2)
            block, stride = torch.stack((a + b, a - b), dim=-2).flatten(-3), 2 * stride
        blocks.append(block * (1.0 / torch.tensor(float(size)).sqrt().item()) if size > 1 else block)
        first += size
    return torch.cat(blocks, dim=-1) if blocks else floats
