"""What int8 and int4 caches store, in numpy: the oracle of the R-worker's quantiser."""

from __future__ import annotations

import numpy as np

GROUP_DIMS = 64


def stored_int8(rows: np.ndarray) -> np.ndarray:
    """``rows`` [..., dim] float32 after a trip through int8 codes with one float32 scale per row."""
    scale = (np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float32)
    codes = np.rint(np.divide(rows, scale, out=np.zeros_like(rows), where=scale > 0))
    return codes.astype(np.float32) * scale


def stored_int4(rows: np.ndarray) -> np.ndarray:
    """The same through int4 codes with a bfloat16 scale and zero per group of 64 dims."""
    groups = [rows[..., i : i + GROUP_DIMS] for i in range(0, rows.shape[-1], GROUP_DIMS)]
    return np.concatenate([_stored_group(group) for group in groups], axis=-1)


def _stored_group(rows: np.ndarray) -> np.ndarray:
    zero = _bfloat_below(rows.min(axis=-1, keepdims=True))
    scale = _bfloat_nearest((rows.max(axis=-1, keepdims=True) - zero) / np.float32(15))
    codes = np.rint(np.divide(rows - zero, scale, out=np.zeros_like(rows), where=scale > 0))
    assert codes.min() >= 0 and codes.max() <= 15
    return zero + codes.astype(np.float32) * scale


def _bfloat_below(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    up = (bits >> 31 == 1) & (bits & 0xFFFF != 0)
    return ((bits >> 16) + up << 16).astype(np.uint32).view(np.float32)


def _bfloat_nearest(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
