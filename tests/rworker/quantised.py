"""The numbers that a cache of any KV dtype stores, in numpy: the oracle of the quantiser and of exported bytes."""

from __future__ import annotations

import numpy as np

from .oracle import rounded, to_bits

KV_DTYPES = ["float32", "float16", "bfloat16", "int8", "int4"]
QUANTISED = ["int8", "int4"]
GROUP_DIMS = 64


def stored(rows: np.ndarray, kv_dtype: str, keys: bool) -> np.ndarray:
    """Return ``rows`` [..., dim] float32 after a trip through the cache, as ``keys`` or as values."""
    if kv_dtype == "int8":
        codes, scale = _int8(rows)
        return codes * scale
    if kv_dtype == "int4":
        groups = _int4_groups(rows, keys)
        return rotated(np.concatenate([zero + codes * scale for codes, scale, zero in groups], axis=-1))
    return rounded(rows, kv_dtype)


def exported(rows: np.ndarray, kv_dtype: str, keys: bool) -> np.ndarray:
    """Return the bytes that a cache exports for ``rows`` [..., dim] float32: uint8 [..., bytes].

    Codes come first, then scales, and for int4 ``keys`` the fifth bits.
    """
    if kv_dtype == "int8":
        codes, scale = _int8(rows)
        return np.concatenate([(codes + 128).astype(np.uint8), scale.view(np.uint8)], axis=-1)
    if kv_dtype == "int4":
        groups = _int4_groups(rows, keys)
        codes = np.concatenate([codes for codes, _, _ in groups], axis=-1).astype(np.uint8)
        terms = np.concatenate([term for _, scale, zero in groups for term in (scale, zero)], axis=-1)
        parts = [_two_to_a_byte(codes & 15), to_bits(terms, "bfloat16").view(np.uint8)]
        return np.concatenate([*parts, _fifth_bits(codes)] if keys else parts, axis=-1)
    return to_bits(rows, kv_dtype).view(np.uint8)


def rotated(rows: np.ndarray) -> np.ndarray:
    """Return ``rows`` [..., dim] times Hadamard's matrix, which is its own inverse.

    Blocks have powers of two, the largest first. Sums have the order of kernels/rotate.hpp, and so the same bits.
    """
    blocks, first = [], 0
    while first < rows.shape[-1]:
        n = 1 << (rows.shape[-1] - first).bit_length() - 1
        block = rows[..., first : first + n]
        for stride in (1 << i for i in range(n.bit_length() - 1)):
            pairs = block.reshape(*rows.shape[:-1], n // (2 * stride), 2, stride)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            block = np.stack([a + b, a - b], axis=-2).reshape(block.shape)
        blocks.append(block * (np.float32(1) / np.sqrt(np.float32(n))))
        first += n
    return np.concatenate(blocks, axis=-1)


def _int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of -127 to 127 as float32, and one float32 scale per row."""
    scale = (np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float32)
    return np.rint(np.divide(rows, scale, out=np.zeros_like(rows), where=scale > 0)), scale


def _int4_groups(rows: np.ndarray, keys: bool) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return for each group of dims of the rotated rows its codes, scale and zero.

    Codes are 0 to 15, of ``keys`` 0 to 31, as float32; scale and zero fit in bfloat16.
    """
    rows, top = rotated(rows), np.float32(31 if keys else 15)
    return [_int4_group(rows[..., i : i + GROUP_DIMS], top) for i in range(0, rows.shape[-1], GROUP_DIMS)]


def _int4_group(rows: np.ndarray, top: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    zero = _bfloat_below(rows.min(axis=-1, keepdims=True))
    scale = rounded((rows.max(axis=-1, keepdims=True) - zero) / top, "bfloat16")
    codes = np.rint(np.divide(rows - zero, scale, out=np.zeros_like(rows), where=scale > 0))
    assert ((codes >= 0) & (codes <= top)).all()
    return codes, scale, zero


def _bfloat_below(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    up = (bits >> 31 == 1) & (bits & 0xFFFF != 0)
    return ((bits >> 16) + up << 16).astype(np.uint32).view(np.float32)


def _two_to_a_byte(codes: np.ndarray) -> np.ndarray:
    """Pack two codes into a byte, the lower dim in the low bits; an odd last code has a byte alone."""
    even, odd = codes[..., ::2].copy(), codes[..., 1::2]
    even[..., : odd.shape[-1]] |= odd << 4
    return even


def _fifth_bits(codes: np.ndarray) -> np.ndarray:
    """Return words of 32 dims: bit 8 j + i is that of dim 4 i + j, and zeros follow the last dim."""
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 32)]
    bits = np.pad(codes >> 4, padding).reshape(*codes.shape[:-1], -1, 8, 4)
    return np.packbits(np.swapaxes(bits, -1, -2), axis=-1, bitorder="little").reshape(*codes.shape[:-1], -1)
