"""When the next sequence may start, so that the KV tokens attended per step stay even and within their limit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fastdecode.scheduler.places.speeds import Decayed
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer
from fastdecode.scheduler.policy.load_limit import LoadLimit
from fastdecode.scheduler.policy.output_lengths import Outlook

SLACK = 1.04
"""A user's limit over the schedule's peak: with less, chance keeps newcomers back, and they come as a wave later."""

TOLERANCE = 0.015
"""Spreading the starts may take this part longer and still counts as worth it: its steps are even."""


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

    A strict :class:`LoadLimit` has to be kept. Another is met by the mean load: the schedule's own ripple, F/S, comes
    on top. Such a limit costs nothing to exceed but even steps; starts are spread only while that pays, and what fits
    the free seats starts at once whatever the load.
    """

    def __init__(self, limit: LoadLimit, interval_steps: int | None = None) -> None:
        """``interval_steps``: F, where it is given."""
        self._limit = limit
        self._interval_steps = interval_steps
        self._is_paced = False
        self._steps_paced = 0
        self._looked = 0
        self._earned = 0.0
        self._granted = 0.0
        # The part of earlier newcomers that counts after another one: about the last 1,000 do
        kept_per_newcomer = 0.999
        self._per_newcomer = Decayed(kept_per_newcomer, 2)  # rows of prompts, decode steps

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
        if self._limit.tokens is None or head is None:
            self._is_paced, self._looked = False, 0
            return
        begins = not self._is_paced and self._should_begin(waiting, head, fits_seats, forecast, outlook)
        if begins:
            self._is_paced, self._steps_paced, self._earned, self._granted = True, 0, 0.0, 0.0
        elif self._is_paced and not self._limit.is_strict and self._looks_again(head):
            self._is_paced = outlook is not None and self._goes_on(outlook())
        if self._is_paced:
            self._earn(head, is_idle or begins)

    def affords(self, newcomer: Newcomer) -> bool:
        """Return whether enough was earned for ``newcomer`` to start in this step, on any R-worker."""
        return not self._is_paced or self._granted >= newcomer.kv_area

    def started(self, newcomer: Newcomer) -> None:
        """``newcomer`` starts in this step."""
        if self._is_paced:
            self._granted -= newcomer.kv_area
        decode_steps = (1 + newcomer.num_siblings) * newcomer.decode_steps
        self._per_newcomer.add(newcomer.num_left, decode_steps)

    @property
    def bounds_rows(self) -> bool:
        """True if ``most_rows`` may be less than the token budget."""
        limit, knows_newcomers = self._limit, bool(self._per_newcomer.sums[1])
        return not limit.is_strict and not self._is_paced and limit.tokens is not None and knows_newcomers

    def most_rows(self, kv_loads: np.ndarray, free_seats: float, num_seats: int, token_budget: int) -> int:
        """Return the most rows of a step that attends ``kv_loads``, float64 [num_workers], prompts' included;
        ``free_seats``: the part of all seats that no sequence decodes in."""
        if not self.bounds_rows:
            return token_budget
        present = self._limit.shares > 0
        hidden = float((kv_loads[present] / self._limit.of_workers[present]).max())
        even = min(token_budget, num_seats * (1 + self._per_newcomer.ratio(0, 1)) * max(1.0, hidden))
        # Part of all seats that are free where prompts have all of the token budget
        filling = 1 / 8
        return int(np.ceil(even + (token_budget - even) * min(1.0, free_seats / filling) ** 2))

    def _should_begin(
        self,
        waiting: Callable[[], list[Newcomer]],
        head: Newcomer,
        fits_seats: bool,
        forecast: Callable[[], LoadForecast],
        outlook: Callable[[], Outlook] | None,
    ) -> bool:
        """Return a user's limit has to be kept; else staggering must pay, from the first step of a queue or clearly."""
        if self._limit.is_strict:
            return self._exceeds(waiting(), forecast())
        if outlook is None or fits_seats or not self._looks_again(head) or not self._exceeds(waiting(), forecast()):
            return False
        ahead = outlook()
        return ahead.spread <= (1 + TOLERANCE if self._looked == 1 else 1 - TOLERANCE) * ahead.together

    def _goes_on(self, ahead: Outlook) -> bool:
        """Return whether starts stay spread: to end that has to win a part of all that was spread so far as well."""
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
        mean = (self._limit.tokens or 0) / (ripple * slack if self._limit.is_strict else 1.0)
        enough = max(interval * mean, area)
        # The part of a sequence's life whose earnings are kept while newcomers wait for room: more would start as a
        # wave
        kept_part = 1 / 16
        self._earned = min(self._earned + mean, enough + mean * head.decode_steps * kept_part - self._granted)
        total = self._earned + self._granted
        is_due = self._steps_paced % self._interval_steps == 0 if self._interval_steps else total >= enough
        if at_once or is_due:
            self._granted, self._earned = max(total, enough if at_once else area), 0.0
        self._steps_paced += 1

    def _interval(self, head: Newcomer) -> float:
        """Return F, the steps from one micro-batch to the next."""
        if self._interval_steps is not None:
            return self._interval_steps
        steps, prompt_rows = head.kv_area / (self._limit.tokens or 1), head.num_prefill * (1 + head.num_siblings)
        num_workers = np.count_nonzero(self._limit.shares)
        uneven, bursts = num_workers * steps / max(1, head.decode_steps), prompt_rows / max(1, head.decode_steps)
        least = head.decode_steps / 32 if self._limit.is_strict else 1.0
        return max(1.0, least, num_workers * steps if uneven > bursts else steps)

    def _exceeds(self, waiting: list[Newcomer], forecast: LoadForecast) -> bool:
        """Return whether all of ``waiting``, started now, would ever exceed the limit."""
        cached = np.array([newcomer.num_prefill for newcomer in waiting])
        steps = np.array([newcomer.decode_steps for newcomer in waiting])
        members = np.array([1 + newcomer.num_siblings for newcomer in waiting])
        nowhere = np.zeros(members.sum(), np.int64)
        together = LoadForecast(nowhere, np.repeat(cached, members), np.repeat(steps, members), 1, token_budget=0)
        total = np.zeros(max(together.horizon, forecast.horizon))
        total[: forecast.horizon] += forecast.loads.sum(axis=0)
        total[: together.horizon] += together.loads[0]
        return bool(total.max() > (self._limit.tokens or 0))
