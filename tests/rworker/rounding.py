"""How far a kernel may be from the oracle, from the sizes of its roundings alone.

A rounding errs by an unforeseeable part of its unit, up or down. Errors therefore add up like the steps of a random
walk: to the root of the sum of their squares. In no test's lifetime does a sum exceed DEVIATIONS times that. An error
deviates by at most 1/sqrt(3) of its bound, so these are five standard deviations of the sum (seven as measured).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .oracle import Attended
from .quantised import rotated

DEVIATIONS = 3.0

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative change of a number that is rounded to nearest."""

LEAST = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""The largest change of a number that is too small for the dtype's range of exponents."""

ROUNDS_FACTORS = {"bfloat16": ("avx512_bf16", "avx512_amx", "neon_bf16"), "float16": ("neon_bf16",)}
"""Instruction sets that also round queries and weights to the dtype when they multiply with a cache of it."""

CODE_LIMITS = {"int8": (16256, 32767), "int4": (2015, 4095)}
"""Queries and weights are whole numbers up to these limits where keys and values are codes (kernels/factors.hpp)."""

BYTES = {
    "int8": ("avx512_vnni", "avx512_bf16", "neon_bf16"),
    "int4": ("avx2", "avx512_vnni", "avx512_bf16", "neon_bf16"),
}
"""Instruction sets that multiply codes as bytes, unless ALiBi is used or a KV head has under BYTE_GROUP query heads.
Queries (rotated for int4) are excepted if their largest channel exceeds BYTE_PEAK times their root mean square,
where the mean includes the padding to 16.
"""
BYTE_LIMITS, BYTE_GROUP, BYTE_PEAK = (127, 255), {"int8": 4, "int4": 1}, 6.0

LARGEST_CODE = {"int8": 127.0, "int4": 7.5}
"""The largest size of a code; int4 codes are counted from their middle."""

EXP_OPERATIONS = 16
"""Float32 operations from a score to its weight: the polynomial's, the soft cap's and the slope's."""


@dataclass(frozen=True)
class Roundings:
    """The roundings of an R-worker that runs ``isa``, for ``group`` query heads per KV head."""

    model_dtype: str
    kv_dtype: str
    isa: str
    group: int
    alibi: bool

    def bound(self, at: Attended, scale: float) -> float:
        """Return the largest norm of the error of one row and head; ``scale`` is that of its scores."""
        if self.kv_dtype == "int4":
            at = replace(at, query=rotated(at.query), keys=rotated(at.keys), values=rotated(at.values))
        output = np.linalg.norm(at.weights @ at.values)
        # A weight is in the sum of products and in the sum of weights.
        reach = np.linalg.norm(at.values, axis=1) + output
        steps = at.weights * reach * self._weight_errors(at, scale)
        # Sums of float32 over all tokens err by at most the steps of the walk of values.
        sums = UNIT["float32"] * np.sqrt(len(reach)) * np.linalg.norm(at.weights * reach)
        walk = np.sqrt((steps**2).sum() + self._code_steps(at) ** 2) + sums
        stored = UNIT[self.model_dtype] * output + LEAST[self.model_dtype] * np.sqrt(at.values.shape[1])
        return float(DEVIATIONS * walk + stored)

    def _weight_errors(self, at: Attended, scale: float) -> np.ndarray:
        """Return by which part each weight [n] may be wrong, by its own rounding and by its score's."""
        products = scale * np.linalg.norm(at.keys * at.query, axis=1)
        operations = EXP_OPERATIONS + np.sqrt(at.keys.shape[1]) * products + np.abs(at.raw) + np.abs(at.below)
        errors = UNIT["float32"] * operations
        if self.isa in ROUNDS_FACTORS.get(self.kv_dtype, ()):
            return errors + UNIT[self.kv_dtype] * (1.0 + (products if self.model_dtype != self.kv_dtype else 0.0))
        if self.kv_dtype in CODE_LIMITS:
            query_step = np.abs(at.query).max() / self._limits(at)[0] / 2
            errors = errors + scale * query_step * np.linalg.norm(at.keys, axis=1)
        return errors

    def _limits(self, at: Attended) -> tuple[int, int]:
        enough_heads = self.group >= BYTE_GROUP[self.kv_dtype]
        bytes_multiply = self.isa in BYTES[self.kv_dtype] and enough_heads and not self.alibi
        padded = -(-len(at.query) // 16) * 16
        peaked = np.abs(at.query).max() > BYTE_PEAK * np.sqrt((at.query**2).sum() / padded)
        return BYTE_LIMITS if bytes_multiply and not peaked else CODE_LIMITS[self.kv_dtype]

    def _code_steps(self, at: Attended) -> float:
        """Return the error of weights that are whole numbers: each step is at most that of the heaviest value."""
        if self.kv_dtype not in CODE_LIMITS:
            return 0.0
        largest, limit = LARGEST_CODE[self.kv_dtype], self._limits(at)[1]
        heaviest = (at.weights * np.abs(at.values).max(axis=1)).max() / largest
        return float(heaviest / limit / 2 * largest * np.sqrt(at.values.size))
