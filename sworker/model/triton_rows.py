"""Triton kernels over rows on a GPU: RMSNorm, rotary embedding, and silu of one tensor times another.

``TRITON_INTERPRET=1``, set before triton is imported, runs the kernels on CPU tensors; tests do so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(x, weight, out, width, eps, offset, ROUND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + start + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    normed = wide / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    if ROUND:
        normed = normed.to(values.dtype).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + start + columns, (normed * scale).to(values.dtype), mask=inside)


@triton.jit
def _rotate(x, cos, sin, out, token_stride, head_stride, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    low = tl.arange(0, BLOCK)
    inside = low < half
    source = x + token * token_stride + head * head_stride
    first = tl.load(source + low, mask=inside, other=0.0)
    second = tl.load(source + half + low, mask=inside, other=0.0).to(tl.float32)
    angles = token * 2 * half + low
    cos_low = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angles + half, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angles + half, mask=inside, other=0.0).to(tl.float32)
    wide = first.to(tl.float32)
    place = out + (token * heads + head) * 2 * half + low
    tl.store(place, (wide * cos_low - second * sin_low).to(first.dtype), mask=inside)
    tl.store(place + half, (second * cos_high + wide * sin_high).to(first.dtype), mask=inside)


@triton.jit
def _silu_times(gate, up, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    values = tl.load(gate + places, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(values.dtype).to(tl.float32)
    other = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, (activated * other).to(values.dtype), mask=inside)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool) -> torch.Tensor:
    """Return ``rows`` […, width] divided by their root mean square, times (``offset`` + ``weight`` [width]).

    With ``round_first``, the quotient is rounded to the dtype before it is multiplied.
    """
    x = rows.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        _rms_norm[(x.numel() // width,)](
            x, weight, out, width, eps, offset, ROUND=round_first, BLOCK=triton.next_power_of_2(width)
        )
    return out


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``heads`` [1, heads, T, dim] rotated by the angles of ``cos`` and ``sin``, both contiguous [1, T, dim]."""
    x = heads if heads.stride(-1) == 1 else heads.contiguous()
    _, num_heads, tokens, dim = x.shape
    out = torch.empty((1, tokens, num_heads, dim), dtype=x.dtype, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(dim // 2)
        _rotate[(tokens, num_heads)](x, cos, sin, out, x.stride(2), x.stride(1), dim // 2, BLOCK=block)
    return out.transpose(1, 2)


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu of ``gate``, rounded to its dtype, times ``up``."""
    first, second = gate.contiguous(), up.contiguous()
    out = torch.empty_like(first)
    if first.numel():
        block = 1024
        _silu_times[(-(-first.numel() // block),)](first, second, out, first.numel(), BLOCK=block)
    return out
