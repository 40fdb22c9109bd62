"""Attention in float64, to tell how exact a kernel is."""

from __future__ import annotations

import numpy as np


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """float64 o [q_len, num_heads, dim] of a sequence's last tokens, each attending to itself and all before it.

    ``q``: [q_len, num_heads, dim]; ``k`` and ``v``: [length, num_kv_heads, dim].
    """
    q_len, num_heads, _ = q.shape
    length, num_kv_heads, value_dim = v.shape
    group = num_heads // num_kv_heads
    hidden = np.arange(length) > np.arange(length - q_len, length)[:, None, None]
    out = np.empty((q_len, num_heads, value_dim))
    for head in range(num_kv_heads):
        own = slice(head * group, (head + 1) * group)
        scores = np.where(hidden, -np.inf, q[:, own].astype(np.float64) @ k[:, head].astype(np.float64).T * scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, own] = (weights / weights.sum(axis=-1, keepdims=True)) @ v[:, head].astype(np.float64)
    return out


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest ‖got − want‖ / ‖want‖ over the last axis."""
    error = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return float((error / np.maximum(np.linalg.norm(want, axis=-1), 1e-30)).max())
