"""How far a kernel may be from the oracle: what its roundings add up to, and no number that was tried out.

A rounding errs by a part of its unit that nobody can foresee, up or down, so that errors add up like steps of a random
walk: to the root of the sum of their squares, and to more than DEVIATIONS times that in no test's lifetime (an error
deviates by at most 1/sqrt(3) of its bound, so these are five standard deviations of the sum; as measured, seven).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .oracle import Attended
from .quantised import rotated

DEVIATIONS = 3.0

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The most by which rounding to nearest changes a number, relative to it."""

LEAST = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""The most by which it changes one that is too small for the dtype's range of exponents."""

ROUNDS_FACTORS = {"bfloat16": ("avx512_bf16", "avx512_amx", "neon_bf16"), "float16": ("neon_bf16",)}
"""Instruction sets whose products with a cache of this dtype round queries and weights to it, too."""

CODE_LIMITS = {"int8": (16256, 32767), "int4": (2015, 4095)}
"""Queries and weights are whole numbers up to so much where keys and values are codes (kernels/factors.hpp)."""

BYTES = {
    "int8": ("avx512_vnni", "avx512_bf16", "neon_bf16"),
    "int4": ("avx2", "avx512_vnni", "avx512_bf16", "neon_bf16"),
}
"""Instruction sets that multiply codes by bytes where a KV head has BYTE_GROUP query heads or more and no ALiBi, but
for queries (of int4 rotated) whose largest channel is more than BYTE_PEAK times their root mean square, padding to 16
included."""
BYTE_LIMITS, BYTE_GROUP, BYTE_PEAK = (127, 255), {"int8": 4, "int4": 1}, 6.0

LARGEST_CODE = {"int8": 127.0, "int4": 7.5}
"""The size of a code, int4 codes about their middle."""

EXP_OPERATIONS = 16
"""Of float32, from a score to its weight: the polynomial's, the soft cap's and the slope's."""


@dataclass(frozen=True)
class Roundings:
    """Those of an R-worker that runs ``isa``; ``group``: query heads of a KV head."""

    model_dtype: str
    kv_dtype: str
    isa: str
    group: int
    alibi: bool

    def bound(self, at: Attended, scale: float) -> float:
        """The largest norm of the error of what one row and head gets; ``scale``: of its scores."""
        if self.kv_dtype == "int4":
            at = replace(at, query=rotated(at.query), keys=rotated(at.keys), values=rotated(at.values))
        output = np.linalg.norm(at.weights @ at.values)
        reach = np.linalg.norm(at.values, axis=1) + output  # a weight is in the sum of products and in that of weights
        steps = at.weights * reach * self._weight_errors(at, scale)
        # Sums of float32 over all tokens, each of at most what the steps of the walk of values have come to.
        sums = UNIT["float32"] * np.sqrt(len(reach)) * np.linalg.norm(at.weights * reach)
        walk = np.sqrt((steps**2).sum() + self._code_steps(at) ** 2) + sums
        stored = UNIT[self.model_dtype] * output + LEAST[self.model_dtype] * np.sqrt(at.values.shape[1])
        return float(DEVIATIONS * walk + stored)

    def _weight_errors(self, at: Attended, scale: float) -> np.ndarray:
        """[n]: by which part each weight may be wrong: its own rounding, and that of its score."""
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
        """The steps of weights that are whole numbers: at most as large as that of the heaviest value's."""
        if self.kv_dtype not in CODE_LIMITS:
            return 0.0
        largest, limit = LARGEST_CODE[self.kv_dtype], self._limits(at)[1]
        heaviest = (at.weights * np.abs(at.values).max(axis=1)).max() / largest
        return float(heaviest / limit / 2 * largest * np.sqrt(at.values.size))
