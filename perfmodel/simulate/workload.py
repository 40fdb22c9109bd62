"""The requests of a simulation, at any rate of arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode.perfmodel.simulate.lengths import LengthDistribution, TraceItem
from fastdecode.perfmodel.simulate.request import SimulatedRequest


@dataclass(frozen=True)
class SimulatedWorkload:
    """What arrives, in order. ``arrivals``: seconds at one request per second, float64 [n]; rates stretch them.

    ``own_rate``: requests per second of whoever was recorded; infinite where all come at once.
    """

    prompts: Sequence[list[int]]
    output_lens: Sequence[int]
    arrivals: np.ndarray
    own_rate: float = math.inf

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.prompts)

    def at(self, rate: float) -> list[SimulatedRequest]:
        """Fresh requests arriving at ``rate`` per second; infinite: all at once."""
        moments = (self.arrivals / rate).tolist()
        return [SimulatedRequest(*each) for each in zip(self.prompts, self.output_lens, moments, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return int((self.prompt_lens + np.array(self.output_lens)).max())

    @property
    def prompt_lens(self) -> np.ndarray:
        """Tokens of each prompt, int64 [n]."""
        return np.array([len(prompt) for prompt in self.prompts])


def drawn_workload(lengths: LengthDistribution, count: int, seed: int) -> SimulatedWorkload:
    """``count`` requests with ``lengths``, Poisson arrivals."""
    rng = np.random.default_rng(seed)
    pairs = lengths.draw(count, rng)
    return _of_lengths(pairs, np.cumsum(rng.exponential(1.0, count)), math.inf)


def traced_workload(items: Sequence[TraceItem]) -> SimulatedWorkload:
    """The requests of a trace, which has its own rate: arrivals less one over the time they span."""
    moments = np.array([item.arrival_seconds for item in items])
    rate = (len(items) - 1) / moments[-1] if moments[-1] > 0 else math.inf
    arrivals = moments * rate if rate < math.inf else moments
    return _of_lengths([(item.prompt_len, item.output_len) for item in items], arrivals, rate)


def _of_lengths(pairs: Sequence[tuple[int, int]], arrivals: np.ndarray, own_rate: float) -> SimulatedWorkload:
    """Only lengths are known, so every token is 0."""
    return SimulatedWorkload([[0] * prompt for prompt, _ in pairs], [out for _, out in pairs], arrivals, own_rate)
