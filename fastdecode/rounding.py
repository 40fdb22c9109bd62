"""float32 values as a payload or a cache carries them, and back."""

from __future__ import annotations

import numpy as np


def to_wire(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 ``values`` rounded to ``dtype``, to nearest even: float32, or uint16 bits of float16 or bfloat16."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_wire(payload: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of a payload; the inverse of :func:`to_wire`."""
    if dtype == "float32":
        return payload
    if dtype == "float16":
        return payload.view(np.float16).astype(np.float32)
    return (payload.astype(np.uint32) << 16).view(np.float32)
