"""Dtypes of models and KV caches: their bytes per element, and the form in which floats are sent to R-workers."""

from __future__ import annotations

from typing import Literal

import numpy as np

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of each model dtype."""

KV_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
"""Bits per element of each KV dtype, without scales."""

KV_ROTATION: dict[str, Literal["", "hadamard"]] = {"int4": "hadamard"}
"""The matrix that rotates keys, values and queries for each KV dtype that needs one (kernels/rotate.hpp)."""

WIRE_DTYPE: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
}
"""The numpy dtype in which each model dtype is sent between S-worker and R-workers: 16-bit floats as their bits."""


def is_quantized(kv_dtype: str) -> bool:
    """Return whether a cache of ``kv_dtype`` stores quantized integers with scales, not floats of the model's dtype."""
    return KV_BITS.get(kv_dtype, 16) < 16


def row_bytes(dim: int, kv_dtype: str) -> int:
    """Return the bytes of one token's row of ``dim`` elements, keys or values, in one head.
    int8 has a float32 scale per row; int4 has a bfloat16 scale and zero point per group of elements.
    """
    # Elements that share one int4 scale and zero point
    int4_group_dims = 64
    scales = {"int8": 4 * (dim > 0), "int4": 4 * -(-dim // int4_group_dims)}.get(kv_dtype, 0)
    return -(-dim * KV_BITS[kv_dtype] // 8) + scales


def key_bytes(dim: int, kv_dtype: str) -> int:
    """Return the bytes of one token's keys of ``dim`` elements in one head.
    With int4, keys have a fifth bit per element, since rounding harms them more than values.
    """
    # Elements of an int4 key whose fifth bits share a word of 4 bytes
    int4_fifth_bit_dims = 32
    fifth_bits = 4 * -(-dim // int4_fifth_bit_dims) if kv_dtype == "int4" else 0
    return row_bytes(dim, kv_dtype) + fifth_bits


def to_wire(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 ``values`` rounded to nearest even as ``dtype``. 16-bit floats become uint16 bits."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_wire(payload: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float32 values of ``payload``, which :func:`to_wire` made with ``dtype``."""
    if dtype == "float32":
        return payload
    if dtype == "float16":
        return payload.view(np.float16).astype(np.float32)
    return (payload.astype(np.uint32) << 16).view(np.float32)
