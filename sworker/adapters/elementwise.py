"""Elementwise functions that give an element the same bits wherever it lies in its tensor (CPU).

torch divides a tensor among threads, and computes each thread's share by vector instructions. It computes the last
elements of a share, fewer than two vectors, one by one. In some functions, these elements may have other bits. A row's
bits would then depend on the number of rows beside it, unless its width is a multiple of two vectors. The numbers of
recurrent layers have few elements per row: one per head. A state of 16 bits makes such a difference larger, since the
state may round to another number. So our forwards pad tensors until every share is whole vectors.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from fastdecode.sworker.run.pipeline import aligned


def use_aligned_functions() -> None:
    """Replace functions whose vectors round otherwise than single elements, in our forwards.

    Other callers get torch's own functions. May be called repeatedly.
    """
    names = {F: "elu gelu mish silu softplus", torch: "rsqrt sigmoid", torch.Tensor: "rsqrt sigmoid"}
    for owner, several in names.items():
        for name in several.split():
            if not hasattr(getattr(owner, name), "__wrapped__"):
                setattr(owner, name, aligned(getattr(owner, name), aligned_count))


@functools.lru_cache(1024)
def aligned_count(count: int, num_threads: int) -> int:
    """Return the least number of elements, ``count`` or more, whose shares of ``num_threads`` are whole vectors."""
    # Elements of two vectors of the widest instruction set, in a dtype of 16 bits
    stride = 64
    # Most elements that torch always computes in one thread, and least elements of a share. ``gelu`` has no least.
    alone, grain = 1 << 14, 1 << 15
    if count <= alone or num_threads == 1:
        return -(-count // stride) * stride
    while True:
        shares = min(num_threads, -(-count // grain))
        unit = stride * math.lcm(shares, num_threads)
        padded = -(-count // unit) * unit
        if min(num_threads, -(-padded // grain)) == shares:
            return padded
        count = padded
