"""When the next sequence may start, so that the KV tokens attended per step stay even and within their limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fastdecode.core.decayed import Decayed
from fastdecode.core.errors import RequestError
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer
from fastdecode.scheduler.policy.output_lengths import Outlook
from fastdecode.scheduler.store.workers import Workers

NUM_STEPS = 20
"""Decode steps that are measured."""

SLACK = 1.04
"""A user's limit over the schedule's peak: with less, chance keeps newcomers back, and they come as a wave later."""

KEPT_PART = 1 / 16
"""Of a sequence's life, what it earns in which is kept while newcomers wait for room: more would start as a wave."""

TOLERANCE = 0.015
"""Spreading the starts may take this part longer and still counts as worth it: its steps are even."""

KEPT_PER_NEWCOMER = 0.999
"""What of newcomers counts after another one: about the last 1,000 do."""

ROUNDING = 1 + 1e-12
"""What is shared adds up to all of it: else a sequence that just fits would not."""

FILLING = 1 / 8
"""Part of all seats that are free where prompts have all of the token budget."""


class LoadControl:
    """FastDecode's load control (paper, section 4.2), for unequal lengths, prompts and arrivals.

    A newcomer starts where the forecast, with it, stays within the limit of its R-worker in every coming step. That
    alone would start one big wave: so starts are spread as well. Each costs its KV area, and every step earns the mean
    load, since in a steady state the area started per step is the mean load. Earnings are spent in micro-batches:
    every F steps as many sequences as F steps earn, which for equal lengths S and B in flight are the paper's
    M = B·F/S. Unless F is given it is short, so that prompts do not come in bursts; but where an R-worker holds few
    sequences it is what it takes to earn one for each of them, so that all have the same mix of ages at every moment
    (else the one whose oldest is about to end would always be far above the mean). What cannot be spent, because a
    sequence waits for room, is kept.

    Where starts are not spread, the S-worker's load is kept even: with all seats taken a step has at most the rows of a
    mean one, which are a token for each seat and what newcomers' prompts bring for each token, or as many more as
    R-workers above their limits hide. Free seats add what the token budget leaves, little where few are free: they are
    to be filled soon, and a long prompt must not wait. A strict limit needs prompts to end when the forecast says, so
    then prompts take all that the token budget leaves; and so they do where starts are spread, as micro-batches.

    ``limit``: KV tokens per step over all R-workers, shared in proportion to speeds; None while unknown.
    ``is_strict``: the user's limit, never exceeded. Else it is where R time equals S time, which the mean load is to
    meet: the schedule's own ripple, F/S, comes on top. Such a limit costs nothing to exceed but even steps; starts are
    spread only while that pays, and what fits the free seats starts at once whatever the load.
    """

    def __init__(self, limit: int | None, workers: Workers, interval_steps: int | None = None) -> None:
        self.limit: int | None = limit
        self.is_strict = limit is not None
        self._longest = 0
        self._workers = workers
        self._interval_steps = interval_steps
        self._is_paced = False
        self._steps_paced = 0
        self._looked = 0
        self._earned = 0.0
        self._granted = 0.0
        self._per_newcomer = Decayed(KEPT_PER_NEWCOMER, 2)  # rows of prompts, decode steps

    @property
    def _shares(self) -> np.ndarray:
        return self._workers.shares

    @property
    def limits(self) -> np.ndarray:
        """The limit of each R-worker, float64 [num_workers]; infinite while unknown."""
        return self._shares * (np.inf if self.limit is None else self.limit * ROUNDING)

    def check(self, longest: int) -> None:
        """RequestError when a sequence of ``longest`` cached tokens can never run; a limit that is not strict grows."""
        if self.is_strict and longest > self.limits.max():
            needed = int(np.ceil(longest / self._shares.max()))
            raise RequestError(
                f"a sequence of {longest} cached tokens exceeds the largest R-worker's share, {int(self.limits.max())} "
                f"tokens, of the KV load limit {self.limit}: give a kv_load_limit of at least {needed}"
            )
        self._longest = max(self._longest, longest)
        self._hold_longest()

    def balance_at(self, kv_tokens: int) -> None:
        """R time was found to equal S time when each R-worker attends ``kv_tokens`` times its part of the speed."""
        self.limit = kv_tokens * int(np.count_nonzero(self._shares))
        self._hold_longest()

    def join(self, worker: int, share: float) -> None:
        """``worker`` has joined, ``share`` times as fast as all others together: they keep their limits."""
        self._shares[worker] = share
        self._shares[:] /= 1 + share
        if self.limit is not None:
            self.limit = int(self.limit * (1 + share))

    def follow(self, speeds: np.ndarray) -> None:
        """Share the limit in proportion to ``speeds``, float64 [num_workers]. A strict limit keeps its shares: what
        was let in because it fits one of them must fit in the end."""
        if not self.is_strict:
            shares = np.where(self._shares > 0, speeds, 0.0)
            self._shares[:] = shares / shares.sum()
            self._hold_longest()

    def lose(self, worker: int) -> None:
        """``worker`` is gone: the others keep their limits, and the total falls by its share."""
        kept = 1 - self._shares[worker]
        self._shares[worker] = 0
        self._shares[:] /= kept
        if self.limit is not None:
            self.limit = int(self.limit * kept)
            self._hold_longest()

    def holds(self, worker: int, longest: int) -> bool:
        """Whether a sequence that may reach ``longest`` cached tokens can be on ``worker`` at all."""
        return not self.is_strict or longest <= self.limits[worker]

    def begin_step(
        self,
        waiting: Callable[[], list[Newcomer]],
        head: Newcomer | None,
        fits_seats: bool,
        is_idle: bool,
        forecast: Callable[[], LoadForecast],
        outlook: Callable[[], Outlook] | None,
    ) -> None:
        """Decide whether starts are spread, and earn a step's mean load; a micro-batch's where nothing runs.

        ``head`` is the first that waits, ``waiting`` gives those that the free seats could take now, in order, workers
        unknown; ``fits_seats``: they are all. ``outlook`` is the rest of the run, if asked for; None while
        output lengths are unknown.
        """
        if self.limit is None or head is None:
            self._is_paced, self._looked = False, 0
            return
        begins = not self._is_paced and self._should_begin(waiting, head, fits_seats, forecast, outlook)
        if begins:
            self._is_paced, self._steps_paced, self._earned, self._granted = True, 0, 0.0, 0.0
        elif self._is_paced and not self.is_strict and self._looks_again(head):
            self._is_paced = outlook is not None and self._goes_on(outlook())
        if self._is_paced:
            self._earn(head, is_idle or begins)

    def affords(self, newcomer: Newcomer) -> bool:
        """Whether enough was earned for ``newcomer`` to start in this step, on any R-worker."""
        return not self._is_paced or self._granted >= newcomer.kv_area

    def fits(self, newcomer: Newcomer, forecast: Callable[[], LoadForecast]) -> bool:
        """Whether ``newcomer``'s R-workers stay within their limits with it."""
        if not self.is_strict:
            return True
        limits, holders = self.limits, newcomer.holders
        return all(forecast().peak_with(newcomer, each) <= limits[each] for each in holders)

    def fits_where(self, newcomer: Newcomer, forecast: Callable[[], LoadForecast]) -> np.ndarray:
        """The same for every R-worker, were ``newcomer`` there: bool [num_workers]."""
        if not self.is_strict:
            return np.ones(len(self._shares), bool)
        return forecast().peaks_with(newcomer) <= self.limits

    def started(self, newcomer: Newcomer) -> None:
        """``newcomer`` starts in this step."""
        if self._is_paced:
            self._granted -= newcomer.kv_area
        decode_steps = (1 + newcomer.num_siblings) * newcomer.decode_steps
        self._per_newcomer.add(newcomer.num_left, decode_steps)

    @property
    def bounds_rows(self) -> bool:
        """Whether ``most_rows`` may be less than the token budget."""
        return not self.is_strict and not self._is_paced and self.limit is not None and bool(self._per_newcomer.sums[1])

    def most_rows(self, kv_loads: np.ndarray, free_seats: float, num_seats: int, token_budget: int) -> int:
        """Of a step that attends ``kv_loads``, float64 [num_workers], prompts' included; ``free_seats``: the part
        of all seats that no sequence decodes in."""
        if not self.bounds_rows:
            return token_budget
        present = self._shares > 0
        hidden = float((kv_loads[present] / self.limits[present]).max())
        even = min(token_budget, num_seats * (1 + self._per_newcomer.ratio(0, 1)) * max(1.0, hidden))
        return int(np.ceil(even + (token_budget - even) * min(1.0, free_seats / FILLING) ** 2))

    def _should_begin(
        self,
        waiting: Callable[[], list[Newcomer]],
        head: Newcomer,
        fits_seats: bool,
        forecast: Callable[[], LoadForecast],
        outlook: Callable[[], Outlook] | None,
    ) -> bool:
        """A user's limit has to be kept; else staggering must pay, from the first step of a queue or clearly."""
        if self.is_strict:
            return self._exceeds(waiting(), forecast())
        if outlook is None or fits_seats or not self._looks_again(head) or not self._exceeds(waiting(), forecast()):
            return False
        ahead = outlook()
        return ahead.spread <= (1 + TOLERANCE if self._looked == 1 else 1 - TOLERANCE) * ahead.together

    def _goes_on(self, ahead: Outlook) -> bool:
        """Whether starts stay spread: to end that has to win a part of all that was spread so far as well."""
        return ahead.spread - ahead.together <= 2 * TOLERANCE * (self._steps_paced + ahead.together)

    def _looks_again(self, head: Newcomer) -> bool:
        """True in the first step of a queue, and then 16 times in a sequence's life: looking ahead takes time."""
        self._looked += 1
        return self._looked % max(1, head.decode_steps // 16) == 1 or head.decode_steps < 32

    def _earn(self, head: Newcomer, at_once: bool) -> None:
        """Earn a step's mean load, and say whether a micro-batch starts."""
        area, interval = head.kv_area, self._interval(head)
        middle = head.num_prefill + (head.decode_steps + 1) / 2
        ripple = (middle + (interval - 1) / 2) / middle
        slack = 1.0 if self._interval_steps else SLACK
        mean = (self.limit or 0) / (ripple * slack if self.is_strict else 1.0)
        enough = max(interval * mean, area)
        self._earned = min(self._earned + mean, enough + mean * head.decode_steps * KEPT_PART - self._granted)
        total = self._earned + self._granted
        is_due = self._steps_paced % self._interval_steps == 0 if self._interval_steps else total >= enough
        if at_once or is_due:
            self._granted, self._earned = max(total, enough if at_once else area), 0.0
        self._steps_paced += 1

    def _interval(self, head: Newcomer) -> float:
        """F."""
        if self._interval_steps is not None:
            return self._interval_steps
        steps, prompt_rows = head.kv_area / (self.limit or 1), head.num_prefill * (1 + head.num_siblings)
        num_workers = np.count_nonzero(self._shares)
        uneven, bursts = num_workers * steps / max(1, head.decode_steps), prompt_rows / max(1, head.decode_steps)
        least = head.decode_steps / 32 if self.is_strict else 1.0
        return max(1.0, least, num_workers * steps if uneven > bursts else steps)

    def _hold_longest(self) -> None:
        """A limit that is not strict holds whatever may come, on the fastest R-worker."""
        if self.limit is not None and not self.is_strict:
            self.limit = max(self.limit, int(np.ceil(self._longest / self._shares.max())))

    def _exceeds(self, waiting: list[Newcomer], forecast: LoadForecast) -> bool:
        """Whether all of ``waiting``, started now, would ever exceed the limit."""
        cached = np.array([newcomer.num_prefill for newcomer in waiting])
        steps = np.array([newcomer.decode_steps for newcomer in waiting])
        members = np.array([1 + newcomer.num_siblings for newcomer in waiting])
        nowhere = np.zeros(members.sum(), np.int64)
        together = LoadForecast(nowhere, np.repeat(cached, members), np.repeat(steps, members), 1, token_budget=0)
        total = np.zeros(max(together.horizon, forecast.horizon))
        total[: forecast.horizon] += forecast.loads.sum(axis=0)
        total[: together.horizon] += together.loads[0]
        return bool(total.max() > (self.limit or 0))


class BalanceFinder:
    """Measures the first decode steps, and again whenever the batch has doubled since: S time depends on it."""

    def __init__(self) -> None:
        self._begin(0)

    def observe(
        self, num_rows: int, kv_loads: Sequence[int], s_seconds: float, r_seconds: Sequence[float]
    ) -> int | None:
        """One decode step of ``num_rows``: KV tokens attended and busy seconds of each R-worker, S-worker's seconds.

        Returns, after the last step of a measurement, the KV tokens per step that one R-worker attends in S time.
        """
        if num_rows >= 2 * self._num_rows:
            self._begin(num_rows)
        busiest = int(np.argmax(r_seconds))
        if len(self._s_seconds) == NUM_STEPS or r_seconds[busiest] <= 0:  # none was seen at work
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
        """R time is a fixed part and one per token. A line through the steps separates them where loads differ; it may
        call at most half of the R time fixed, since over nearly equal loads its slope is noise."""
        loads, seconds = np.array(self._kv_loads), np.array(self._r_seconds)
        mean_load, mean_seconds = loads.mean(), float(np.median(seconds))
        ratio = mean_seconds / mean_load
        slope = ratio if np.ptp(loads) < 0.1 * mean_load else float(np.polyfit(loads, seconds, 1)[0])
        per_token = min(max(slope, ratio / 2), ratio)
        fixed = mean_seconds - per_token * mean_load
        return int(max(0.0, float(np.median(self._s_seconds)) - fixed) / per_token)
