"""Attention in float64, one row and head at a time, and the rounding a cache does."""

from __future__ import annotations

import numpy as np

TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-3, "int8": 1e-3, "int4": 3e-3}
"""Largest norm-wise relative error of a row and head, by the coarser of model and KV dtype."""


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as the payload carries ``dtype``: float32, or the bits rounded to nearest even as uint16."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(payload: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of a payload."""
    if dtype == "float32":
        return payload
    if dtype == "float16":
        return payload.view(np.float16).astype(np.float32)
    return (payload.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` after a trip through ``dtype``."""
    return from_bits(to_bits(values, dtype), dtype)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: tuple[float, ...] = (),
    alibi_slopes: tuple[float, ...] = (),
) -> np.ndarray:
    """The last ``len(q)`` tokens of a sequence attend to it: float64 [q_len, num_heads, value_head_dim].

    ``q``: [q_len, num_heads, Dk]; ``k``: [length, num_kv_heads, Dk]; ``v``: [length, num_kv_heads, Dv].
    """
    q_len, num_heads, _ = q.shape
    length, num_kv_heads, value_dim = v.shape
    group = num_heads // num_kv_heads
    out = np.empty((q_len, num_heads, value_dim))
    for row in range(q_len):
        end = length - q_len + row + 1
        begin = max(0, end - window) if window else 0
        for head in range(num_heads):
            keys = k[begin:end, head // group].astype(np.float64)
            values = v[begin:end, head // group].astype(np.float64)
            scores = keys @ q[row, head].astype(np.float64) * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if alibi_slopes:
                scores = scores + np.float32(alibi_slopes[head]) * np.arange(begin - end + 1, 1.0)
            top = max(scores.max(), sinks[head]) if sinks else scores.max()
            weights = np.exp(scores - top)
            total = weights.sum() + (np.exp(sinks[head] - top) if sinks else 0.0)
            out[row, head] = weights @ values / total
    return out


def relative_error(got: np.ndarray, want: np.ndarray, size: np.ndarray | None = None) -> float:
    """The largest norm-wise error over rows and heads, relative to ``want`` or to another ``size`` of its shape."""
    error = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return float((error / np.maximum(np.linalg.norm(want if size is None else size, axis=-1), 1e-30)).max())
