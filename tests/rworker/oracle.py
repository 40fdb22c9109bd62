"""Attention in float64, one row and head at a time, and the rounding that a cache does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values as the payload carries ``dtype``: float32, or bits rounded to nearest even as uint16."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(payload: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float32 values of a payload."""
    if dtype == "float32":
        return payload
    if dtype == "float16":
        return payload.view(np.float16).astype(np.float32)
    return (payload.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``values`` after a trip through ``dtype``."""
    return from_bits(to_bits(values, dtype), dtype)


@dataclass(frozen=True)
class Attended:
    """The inputs and weights of one row and head, in float64.

    The query is [Dk], the keys are [n, Dk] and the values [n, Dv]. The scores [n] are kept as products (``raw``) and as
    exponents below the largest (``below``). The weights [n] sum to one, together with a sink's.
    """

    row: int
    head: int
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    raw: np.ndarray
    below: np.ndarray
    weights: np.ndarray


def attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: tuple[float, ...] = (),
    alibi_slopes: tuple[float, ...] = (),
    chunked: bool = False,
) -> Iterator[Attended]:
    """Yield each row and head of the last ``len(q)`` tokens of a sequence.

    ``q``: [q_len, num_heads, Dk]; ``k``: [length, num_kv_heads, Dk]; ``v``: [length, num_kv_heads, Dv].
    """
    q_len, num_heads, _ = q.shape
    length, num_kv_heads, _ = v.shape
    group = num_heads // num_kv_heads
    for row in range(q_len):
        end = length - q_len + row + 1
        begin = max(0, end - window) if window else 0
        if chunked:
            begin = (end - 1) // window * window
        for head in range(num_heads):
            query = q[row, head].astype(np.float64)
            keys = k[begin:end, head // group].astype(np.float64)
            values = v[begin:end, head // group].astype(np.float64)
            raw = scores = keys @ query * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if alibi_slopes:
                scores = scores + np.float32(alibi_slopes[head]) * np.arange(begin - end + 1, 1.0)
            top = max(scores.max(), sinks[head]) if sinks else scores.max()
            weights = np.exp(scores - top)
            total = weights.sum() + (np.exp(sinks[head] - top) if sinks else 0.0)
            yield Attended(row, head, query, keys, values, raw, scores - top, weights / total)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, **scoring: Any) -> np.ndarray:
    """Return the outputs of the rows and heads of :func:`attended`: float64 [q_len, num_heads, Dv]."""
    out = np.empty((*q.shape[:2], v.shape[-1]))
    for each in attended(q, k, v, **scoring):
        out[each.row, each.head] = each.weights @ each.values
    return out


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest norm-wise error over rows and heads."""
    error = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return float((error / np.maximum(np.linalg.norm(want, axis=-1), 1e-30)).max())
