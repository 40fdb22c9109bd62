"""A step's time as a function of its number of rows: fitted to observed steps, or computed by a ``StepTime``."""

from __future__ import annotations

import math

import numpy as np

from fastdecode.core.protocols import StepTime

LEVEL_RATE = 1 / 16
"""Weight of the last step in the mean time. Noise falls to a fifth, and drift is followed within seconds."""


class RowCost:
    """The time of a step with x rows, in any unit: level + slope · (x - rows).
    ``level`` and ``rows`` are means over the last steps. The slope is fitted to changes from step to step. It lies
    between 0 (constant time) and level / rows (proportional time). Above the highest row count of recent steps, the
    slope is at least ``beyond`` times the proportional slope.
    """

    def __init__(self, prior: float, beyond: float) -> None:
        """``prior``: the slope to assume until the number of rows changes, as a fraction of level / rows.
        ``beyond``: see the class.
        """
        self.rows = self.level = 0.0
        self._prior, self._beyond = prior, beyond
        self._products = self._squares = self._noise = self._widest = 0.0
        self._count = 0

    def slope(self, optimism: float = 0.0) -> float:
        """Return the time per additional row, reduced by ``optimism`` standard errors."""
        if not self.rows:
            return 0.0
        unit, proportional = self.rows * self.rows, self.level / self.rows
        # Weight of the prior slope; for comparison, a step with 25 % more rows has the weight 0.25², or 0.0625
        slope_prior_weight = 0.05
        weight = slope_prior_weight * unit
        fitted = (self._products + weight * self._prior * proportional) / (self._squares + weight)
        # Least relative variance of a step's time that is assumed: a standard deviation of 1 %
        least_noise = 1e-4
        error = math.sqrt(max(self._noise, least_noise) * unit / max(self._squares, 1e-9 * unit))
        return min(max(0.0, fitted - optimism * error * proportional), proportional)

    def observe(self, rows: float, value: float) -> None:
        """Learn that a step of ``rows`` rows took the time ``value``."""
        self._count += 1
        rate = max(LEVEL_RATE, 1 / self._count)
        if self.level > 0:
            value = self._fit(rows, value, rate)
        self.level += rate * (value - self.level)
        self.rows += rate * (rows - self.rows)
        # Decay, per step, of the range of row counts that were observed
        width_rate = LEVEL_RATE / 16
        self._widest = max(rows, self._widest - width_rate * (self._widest - self.rows))

    def at(self, rows: np.ndarray, optimism: float = 0.0) -> np.ndarray:
        """Return the expected times of steps with ``rows`` rows, float64 [n]."""
        slope = self.slope(optimism)
        if not self._widest:
            return np.zeros(len(rows))
        beyond, widest = slope, self.level + slope * (self._widest - self.rows)
        if not optimism:
            beyond = max(slope, self._beyond * widest / self._widest)
        further = rows - self._widest
        return widest + slope * np.minimum(further, 0.0) + beyond * np.maximum(further, 0.0)

    def _fit(self, rows: float, value: float, rate: float) -> float:
        """Fit the slope to one more step; return its time ``value``, cut if it is too long to be due to rows."""
        expected, change = self.level + self.slope() * (rows - self.rows), rows - self.rows
        relative = change / self.rows
        # Largest excess of a step's time over the expected time, as a fraction of that; more is a pause of the machine
        most_jump = 0.5
        highest = (1.0 + most_jump) * max(expected, self.level * rows / self.rows)
        value = min(value, highest)
        self._noise += rate * (((value - expected) / self.level) ** 2 - self._noise)
        # Sum of squared relative changes of rows that the slope remembers: two doublings, or 32 changes of 25 %. Steps
        # with as many rows as before change nothing.
        slope_memory = 2.0
        kept = min(1.0, slope_memory * self.rows**2 / max(self._squares, 1e-9))
        kept *= slope_memory / (slope_memory + relative**2)
        # Relative changes of rows below this are ignored, since noise hides their effect
        least_change = 0.05
        if abs(relative) < least_change:
            return value
        most = change * self.level / self.rows  # a larger change cannot come from the number of rows
        self._products = kept * self._products + change * min(max(value - self.level, min(0.0, most)), max(0.0, most))
        self._squares = kept * self._squares + change * change
        return value


class GivenTimes:
    """The times of a ``StepTime``, computed for a few row counts and interpolated; computed again if loads change."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self._key = (0, 0, 0)
        self._rows = self._times = np.zeros(0)

    def at(self, num_tokens: int, more: np.ndarray, most_more: int, kv_loads: np.ndarray) -> np.ndarray:
        """Return the seconds of steps with ``num_tokens`` rows plus each number in ``more``: float64 [len(more)].
        The highest of ``kv_loads`` is used for every R-worker.
        """
        kv_tokens = int(kv_loads.max() * len(kv_loads)) if len(kv_loads) else 0
        tokens, most, loads = self._key
        # Number of row counts for which a ``StepTime`` is computed, most of them low; times between them are
        # interpolated
        most_points = 33
        # Relative change of the KV load at which the times are computed again
        same_load = 0.02
        if (tokens, most) != (num_tokens, most_more) or abs(kv_tokens - loads) > same_load * loads:
            self._key = (num_tokens, most_more, kv_tokens)
            places = (
                np.linspace(0, 1, most_points) ** 2 if most_more >= most_points else np.linspace(0, 1, most_more + 1)
            )
            self._rows = np.unique(np.rint(most_more * places).astype(int))
            self._times = np.array([self._step_time(num_tokens + int(rows), kv_tokens) for rows in self._rows])
        return np.interp(more, self._rows, self._times)
