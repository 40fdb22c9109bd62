"""The largest batch that still meets a condition, for conditions that only ever turn from true to false."""

from __future__ import annotations

from collections.abc import Callable

MOST = 1 << 20
"""Sequences beyond which no batch is sought."""


def largest(meets: Callable[[int], bool], most: int = MOST) -> int:
    """The largest of 0 … ``most`` that ``meets``; 0 is taken to. Doubles, then halves the gap."""
    high = 1
    while high <= most and meets(high):
        high *= 2
    low = high // 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
