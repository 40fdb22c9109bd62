"""Sums that forget: the longer ago a value was observed, the less it counts."""

from __future__ import annotations

from typing import Any

import numpy as np


class Decayed:
    """Sums of observed values, float64 [num_sums], or [num_sums, n] of n things that are observed one by one.

    ``kept``: the part of a sum that counts after one more observation. About the last 1 / (1 - kept) observations
    count, and the ratio of two sums is a mean over them.
    """

    def __init__(self, kept: float, *shape: int) -> None:
        self.kept = kept
        self.sums = np.zeros(shape)

    def add(self, *values: Any, where: np.ndarray | None = None) -> None:
        """Observe a value of each sum; ``where``, bool [n], says which of n things were observed, else all of them."""
        if where is None:
            self.sums = self.kept * self.sums + values
        else:
            self.sums[:, where] = self.kept * self.sums[:, where] + np.array(values, np.float64)[:, where]

    def ratio(self, top: int, bottom: int, least: float = 1e-300) -> float:
        """Return one sum over another, or over ``least`` where that is more."""
        return float(self.sums[top] / max(self.sums[bottom], least))

    def resize(self, num_things: int) -> None:
        """Make room for ``num_things`` things, of which new ones were not observed yet."""
        self.sums = np.pad(self.sums, ((0, 0), (0, num_things - self.sums.shape[1])))

    def forget(self, thing: int) -> None:
        """Count nothing that was observed of ``thing``."""
        self.sums[:, thing] = 0.0
