"""The limit of KV tokens attended per step: the user's, or one that keeps R-workers as busy as the S-worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from fastdecode.core.errors import RequestError
from fastdecode.scheduler.places.speeds import Observed
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer

logger = logging.getLogger(__name__)

NUM_STEPS = 20
"""Decode steps in one measurement of the balance between S time and R time."""


class LoadLimit:
    """The limit of KV tokens attended per step over all R-workers, divided in proportion to their speeds.
    ``is_strict``: the limit is the user's and is never exceeded. Any other limit is the mean load at which R-workers
    take as long as the S-worker. It is measured if unknown, and allows at least the longest possible sequence. A
    schedule without load control enforces no limit, but a known limit still tells what a row costs the S-worker.
    ``known``: the limit; None while unknown. ``shares``: each R-worker's fraction, float64 [num_workers], 0 for lost
    R-workers.
    """

    def __init__(
        self, given: int | None, workers: Workers, is_kept: bool = True, balanced_kv_tokens: int | None = None
    ) -> None:
        """``given``: the user's limit.
        ``balanced_kv_tokens``: the argument of :meth:`balance_at`, if known beforehand.
        """
        self.known = given
        self.shares = workers.speeds.bandwidths / workers.speeds.bandwidths.sum()
        self._is_given, self._is_kept = given is not None, is_kept
        self._seeks_balance = is_kept and given is None and balanced_kv_tokens is None
        self._longest = 0
        self._speeds, self._balance = workers.speeds, BalanceFinder()
        if given is None and balanced_kv_tokens is not None:
            self.balance_at(balanced_kv_tokens)

    @property
    def tokens(self) -> int | None:
        """Most KV tokens attended per step over all R-workers; None without a limit, or before it is measured."""
        return self.known if self._is_kept else None

    @property
    def is_strict(self) -> bool:
        """True if the user gave the limit, and the schedule keeps limits."""
        return self._is_given and self._is_kept

    @property
    def of_workers(self) -> np.ndarray:
        """Each R-worker's part of the limit in KV tokens, float64 [num_workers]; infinite while unknown."""
        # Without this tolerance for rounding, a sequence that just fits would be refused
        rounding = 1 + 1e-12
        return self.shares * (np.inf if self.known is None else self.known * rounding)

    @property
    def strict(self) -> np.ndarray | None:
        """Each R-worker's part of the limit in KV tokens, float64 [num_workers]; None if it may be exceeded."""
        return self.of_workers if self.is_strict else None

    @property
    def ceilings(self) -> np.ndarray:
        """Most KV tokens that each R-worker may attend in any step, float64 [num_workers].

        They are infinite without a strict limit.
        """
        return self.of_workers if self.is_strict else np.full(len(self.shares), np.inf)

    def check(self, longest: int) -> None:
        """Raise RequestError if a sequence of ``longest`` cached tokens can never run within a strict limit.
        A limit that is not strict grows instead.
        """
        if self.is_strict and longest > self.of_workers.max():
            needed = int(np.ceil(longest / self.shares.max()))
            raise RequestError(
                f"a sequence of {longest} cached tokens exceeds the largest R-worker's share, "
                f"{int(self.of_workers.max())} tokens, of the KV load limit {self.known}: give a kv_load_limit of at "
                f"least {needed}"
            )
        if self._is_kept:
            self._longest = max(self._longest, longest)
            self._hold_longest()

    def holds(self, longest: int, worker: int | slice = slice(None)) -> np.ndarray | bool:
        """Return whether R-worker ``worker`` can ever attend a sequence of ``longest`` cached tokens within its limit.
        For several R-workers this is an array, bool [num_workers].
        """
        return not self.is_strict or longest <= self.of_workers[worker]

    def fits(self, newcomer: Newcomer, forecast: Callable[[], LoadForecast]) -> bool:
        """Return whether the R-workers that would hold ``newcomer`` stay within their limits if it starts."""
        if not self.is_strict:
            return True
        limits, holders = self.of_workers, newcomer.holders
        return all(forecast().peak_with(newcomer, each) <= limits[each] for each in holders)

    def fits_where(self, newcomer: Newcomer, forecast: Callable[[], LoadForecast]) -> np.ndarray:
        """Return, for each R-worker, whether it stays within its limit if it gets ``newcomer``: bool [num_workers]."""
        if not self.is_strict:
            return np.ones(len(self.shares), bool)
        return forecast().peaks_with(newcomer) <= self.of_workers

    def balance_at(self, kv_tokens: int) -> None:
        """Set the limit. ``kv_tokens``: what an R-worker of mean speed attends while the S-worker computes."""
        self.known = kv_tokens * int(np.count_nonzero(self.shares))
        self._hold_longest()

    def observe(self, observed: Observed) -> None:
        """Divide the limit in proportion to the R-workers' speeds; measure the limit if it is unknown.
        A strict limit stays divided as it was, since a sequence that fitted an R-worker's part must still fit later.
        """
        if len(self.shares) > 1 and observed.shows_speeds and not self._is_given:
            shares = np.where(self.shares > 0, self._speeds.lasting, 0.0)
            self.shares[:] = shares / shares.sum()
            self._hold_longest()
        if self._seeks_balance and observed.decodes:
            step = observed.step
            balanced = self._balance.observe(step.num_tokens, step.kv_loads, observed.s_seconds, observed.r_seconds)
            if balanced is not None:
                self.balance_at(balanced)
                logger.info("KV load limit: %d tokens per step, where R time equals S time", self.known)

    def join(self, worker: int, share: float) -> None:
        """Add R-worker ``worker``, which is ``share`` times as fast as all other R-workers together.
        The other R-workers keep their limits, so the total rises.
        """
        if worker == len(self.shares):
            self.shares = np.append(self.shares, 0.0)
        self.shares[worker] = share
        self.shares[:] /= 1 + share
        if self.known is not None:
            self.known = int(self.known * (1 + share))

    def lose(self, worker: int) -> None:
        """Remove R-worker ``worker``. The others keep their limits, so the total falls."""
        kept = 1 - self.shares[worker]
        self.shares[worker] = 0
        self.shares[:] /= kept
        if self.known is not None:
            self.known = int(self.known * kept)
            self._hold_longest()

    def _hold_longest(self) -> None:
        """Raise a limit that is not strict until the fastest R-worker's part allows the longest sequence."""
        if self.known is not None and not self._is_given:
            self.known = max(self.known, int(np.ceil(self._longest / self.shares.max())))


class BalanceFinder:
    """Measures at which KV load R-workers take as long as the S-worker: at first, and when the batch doubles."""

    def __init__(self) -> None:
        self._begin(0)

    def observe(
        self, num_rows: int, kv_loads: Sequence[int], s_seconds: float, r_seconds: Sequence[float]
    ) -> int | None:
        """Learn from one decode step of ``num_rows`` rows; return None until the last step of a measurement.
        ``kv_loads``, ``r_seconds``: attended KV tokens and busy seconds of each R-worker. ``s_seconds``: the S-worker's
        busy seconds. The result is the KV tokens that one R-worker attends while the S-worker computes a step.
        """
        if num_rows >= 2 * self._num_rows:
            self._begin(num_rows)
        busiest = max(range(len(r_seconds)), key=r_seconds.__getitem__)
        # measured already, or no R-worker has attended
        if len(self._s_seconds) == NUM_STEPS or r_seconds[busiest] <= 0:
            return None
        self._s_seconds.append(s_seconds)
        self._kv_loads.append(kv_loads[busiest])
        self._r_seconds.append(r_seconds[busiest])
        return self._balanced_kv_tokens() if len(self._s_seconds) == NUM_STEPS else None

    def _begin(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._s_seconds: list[float] = []
        self._kv_loads: list[float] = []
        self._r_seconds: list[float] = []

    def _balanced_kv_tokens(self) -> int:
        """Return the KV tokens for which one R-worker takes as long as the S-worker takes for a step.
        An R-worker's time has a fixed part and a part per token. A line fitted to the steps separates them if loads
        differ. At most half of the time is taken as fixed, since noise determines the line if loads are nearly equal.
        """
        loads, seconds = np.array(self._kv_loads), np.array(self._r_seconds)
        mean_load, mean_seconds = loads.mean(), median(self._r_seconds)
        ratio = mean_seconds / mean_load
        slope = ratio if np.ptp(loads) < 0.1 * mean_load else float(np.polyfit(loads, seconds, 1)[0])
        per_token = min(max(slope, ratio / 2), ratio)
        fixed = mean_seconds - per_token * mean_load
        return int(max(0.0, median(self._s_seconds) - fixed) / per_token)
