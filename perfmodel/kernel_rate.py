"""What one core makes of the R-worker's kernel, where arithmetic and not memory is the limit."""

from __future__ import annotations

import math

import numpy as np

GROUPS = (1, 4, 8, 32)
"""Query heads per KV head of the columns below."""

GB_PER_SECOND_PER_CORE = {
    "float32": (14.8, 10.9, 7.8, 3.4),
    "float16": (16.8, 12.7, 7.9, 2.2),
    "bfloat16": (17.3, 13.9, 7.8, 2.1),
    "int8": (13.7, 8.7, 4.5, 1.1),
    "int4": (9.8, 4.0, 2.1, 0.5),
}
"""KV read by one thread, head 128, context 1024, on Zen 3 with AVX2, as docs/performance.md records it.

A core that waited for memory in part was timed, so more is possible; AVX-512 was never timed.
"""


def kernel_bytes_per_second(kv_dtype: str, group: int, cores: int) -> float:
    """KV bytes per second ``cores`` cores get through; between the groups measured, interpolated on logarithms.

    Beyond the largest group the arithmetic per byte, and so the time, grows in proportion.
    """
    rates = GB_PER_SECOND_PER_CORE[kv_dtype]
    inside = min(group, GROUPS[-1])
    rate = math.exp(np.interp(math.log(inside), np.log(GROUPS), np.log(rates)))
    return cores * rate * 1e9 * inside / group
