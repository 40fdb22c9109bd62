"""How many requests per second a machine sustains: Sarathi-Serve's capacity (section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode.errors import ConfigError
from fastdecode.perfmodel.simulate.workload import SimulatedRequest

MOST_DOUBLINGS = 12
"""Away from the first guess, before a search gives up."""


@dataclass(frozen=True)
class Slo:
    """What makes a load sustainable: 99 in 100 times between tokens within ``tbt_p99_seconds``, and half of the
    requests started within ``delay_p50_seconds`` (Sarathi-Serve's 2 s: a queue that does not grow)."""

    tbt_p99_seconds: float
    delay_p50_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tbt_p99_seconds", "delay_p50_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 seconds and finite, not {getattr(self, name)!r}")

    def is_met(self, requests: Sequence[SimulatedRequest]) -> bool:
        """Over all of ``requests``; one that has not ended, or never started, does not meet it."""
        if not all(request.finished for request in requests):
            return False
        delay = np.median([request.scheduling_delay_seconds for request in requests])
        gaps = np.concatenate([request.seconds_between_tokens for request in requests])
        slow = np.percentile(gaps, 99) > self.tbt_p99_seconds if len(gaps) else False
        return bool(delay <= self.delay_p50_seconds and not slow)

    def is_lost(self, requests: Sequence[SimulatedRequest], now_seconds: float) -> bool:
        """True as soon as so many have waited so long that the median delay cannot be met any more."""
        limit = self.delay_p50_seconds
        late = sum(
            (now_seconds if request.start_seconds is None else request.start_seconds) - request.arrival_seconds > limit
            for request in requests
        )
        return 2 * late > len(requests) + 1


def find_capacity(meets: Callable[[float], bool], first_guess: float, tolerance: float = 0.02) -> float:
    """The largest rate, to a relative ``tolerance`` from below, that ``meets``, by doubling and bisection.

    0 where not even a 4096th of ``first_guess`` does; infinite where 4096 times as much still does, which says that
    there were too few requests for a queue to show.
    """
    if not first_guess > 0 or not tolerance > 0:
        raise ConfigError(f"a capacity is sought from a rate above 0, not {first_guess!r}")
    low, high = 0.0, math.inf
    rate = first_guess
    for _ in range(MOST_DOUBLINGS + 1):
        low, high = (rate, high) if meets(rate) else (low, rate)
        if low > 0 and high < math.inf:
            break
        rate = 2 * low if low > 0 else high / 2
    else:
        return math.inf if low > 0 else 0.0
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
