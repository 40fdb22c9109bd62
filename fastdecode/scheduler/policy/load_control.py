"""Load control: decides when the next sequence may start, so that the load per step is even and limited."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fastdecode.scheduler.places.speeds import Decayed
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer
from fastdecode.scheduler.policy.load_limit import LoadLimit
from fastdecode.scheduler.policy.output_lengths import Outlook

SLACK = 1.04
"""Ratio of a user's load limit to the peak load that load control aims at.
With less, chance would delay newcomers, and they would start as a wave later.
"""

TOLERANCE = 0.015
"""Starts are spread even if this makes the run longer by this fraction, since its steps are then even."""


class LoadControl:
    """FastDecode's load control (paper, section 4.2), for unequal lengths, prompts and arrivals.

    A sequence starts if the forecast with it stays within its R-worker's limit in every coming step. That alone would
    start many sequences at once, so starts are spread as well. Each start costs its KV area: the KV tokens that it
    attends, summed over its decode steps. Every step earns the mean load; in a steady state, the area started per step
    equals it. Earnings are spent in micro-batches. Every F steps, as many sequences start as F steps earn. For equal
    lengths S and B running sequences, this is the paper's M = B·F/S. By default F is short, so that prompts do not come
    in bursts. But if R-workers hold few sequences, F is long enough to start one sequence on each. Then all R-workers
    have the same mix of ages. Otherwise the R-worker whose oldest sequence is about to end would always be far above
    the mean load. If a sequence finds no free blocks, some earnings are kept.

    If starts are not spread, the rows of each step are limited, so that the S-worker's load is even. With the most
    sequences that may run (``max_num_seqs``), the limit is the rows of a mean step: per sequence, one decode and its
    mean number of prompt rows. If an R-worker exceeds its load limit, more of the S-worker's time is hidden behind it,
    so the row limit rises in proportion. It also rises if fewer sequences run, up to the token budget, so that others
    start soon. With a strict load limit, or with spread starts, rows are not limited in this way: prompts must end when
    the forecast says.

    A strict :class:`LoadLimit` is never exceeded. Any other limit is the mean load to aim at; single steps exceed it by
    the ripple F/S, which only makes them uneven. So starts are spread only while the run does not get much longer.
    Without spreading, sequences start as soon as ``max_num_seqs`` allows.
    """

    def __init__(self, limit: LoadLimit, interval_steps: int | None = None) -> None:
        """``interval_steps``: F, the steps between micro-batches; None to choose it."""
        self._limit = limit
        self._interval_steps = interval_steps
        self._is_paced = False
        self._steps_paced = 0
        self._looked = 0
        self._earned = 0.0
        self._granted = 0.0
        # Factor by which each starting sequence reduces the weight of earlier ones in means: about the last 1,000 count
        kept_per_newcomer = 0.999
        self._per_newcomer = Decayed(kept_per_newcomer, 2)  # the two sums: prompt rows, and decode steps

    def begin_step(
        self,
        waiting: Callable[[], list[Newcomer]],
        head: Newcomer | None,
        fits_seats: bool,
        is_idle: bool,
        forecast: Callable[[], LoadForecast],
        outlook: Callable[[], Outlook] | None,
    ) -> None:
        """Decide whether starts are spread. Earn a step's mean load, or a whole micro-batch's if no sequence runs.
        ``head``: the first waiting sequence. ``waiting``: returns the sequences that ``max_num_seqs`` would allow to
        start now, in order, not placed on R-workers yet. ``fits_seats``: ``waiting`` returns all waiting sequences.
        ``outlook``: returns the rest of the run; None while output lengths are unknown.
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
        """Return whether the earned KV area allows ``newcomer`` to start in this step."""
        return not self._is_paced or self._granted >= newcomer.kv_area

    def started(self, newcomer: Newcomer) -> None:
        """Spend the KV area of ``newcomer``, which starts in this step."""
        if self._is_paced:
            self._granted -= newcomer.kv_area
        decode_steps = (1 + newcomer.num_siblings) * newcomer.decode_steps
        self._per_newcomer.add(newcomer.num_left, decode_steps)

    @property
    def bounds_rows(self) -> bool:
        """True if ``most_rows`` may return less than the token budget."""
        limit, knows_newcomers = self._limit, bool(self._per_newcomer.sums[1])
        return not limit.is_strict and not self._is_paced and limit.tokens is not None and knows_newcomers

    def most_rows(self, kv_loads: np.ndarray, free_seats: float, num_seats: int, token_budget: int) -> int:
        """Return the most rows of a step, prompts included. ``kv_loads``: attended KV tokens, float64 [num_workers].
        ``free_seats``: the fraction of ``max_num_seqs`` without a decoding sequence.
        """
        if not self.bounds_rows:
            return token_budget
        present = self._limit.shares > 0
        hidden = float((kv_loads[present] / self._limit.of_workers[present]).max())
        even = min(token_budget, num_seats * (1 + self._per_newcomer.ratio(0, 1)) * max(1.0, hidden))
        # If at least this fraction of ``max_num_seqs`` is unused, prompts may use the whole token budget
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
        """Return whether starts should be spread.

        Under a strict limit, they should if starting all waiting sequences at once would exceed it. Otherwise the
        expected time of the run decides. In the first step of a queue, spreading may lengthen it by the fraction
        ``TOLERANCE``. Later, spreading must shorten it by the same fraction.
        """
        if self._limit.is_strict:
            return self._exceeds(waiting(), forecast())
        if outlook is None or fits_seats or not self._looks_again(head) or not self._exceeds(waiting(), forecast()):
            return False
        ahead = outlook()
        return ahead.spread <= (1 + TOLERANCE if self._looked == 1 else 1 - TOLERANCE) * ahead.together

    def _goes_on(self, ahead: Outlook) -> bool:
        """Return whether starts stay spread: they do unless starting at once shortens the run enough."""
        return ahead.spread - ahead.together <= 2 * TOLERANCE * (self._steps_paced + ahead.together)

    def _looks_again(self, head: Newcomer) -> bool:
        """Return True in the first step of a queue, and then 16 times in the life of a sequence like ``head``.
        Forecasting the rest of the run in every step would take too long.
        """
        self._looked += 1
        return self._looked % max(1, head.decode_steps // 16) == 1 or head.decode_steps < 32

    def _earn(self, head: Newcomer, at_once: bool) -> None:
        """Earn a step's mean load. If a micro-batch is due, or ``at_once``, let starts spend what was earned."""
        area, interval = head.kv_area, self._interval(head)
        middle = head.num_prefill + (head.decode_steps + 1) / 2
        ripple = (middle + (interval - 1) / 2) / middle
        slack = 1.0 if self._interval_steps else SLACK
        mean = (self._limit.tokens or 0) / (ripple * slack if self._limit.is_strict else 1.0)
        enough = max(interval * mean, area)
        # Earnings kept while no blocks are free: at most the mean load of this fraction of a sequence's decode steps.
        # With more, many sequences would later start at once.
        kept_part = 1 / 16
        self._earned = min(self._earned + mean, enough + mean * head.decode_steps * kept_part - self._granted)
        total = self._earned + self._granted
        is_due = self._steps_paced % self._interval_steps == 0 if self._interval_steps else total >= enough
        if at_once or is_due:
            self._granted, self._earned = max(total, enough if at_once else area), 0.0
        self._steps_paced += 1

    def _interval(self, head: Newcomer) -> float:
        """Return F, the number of steps from one micro-batch to the next."""
        if self._interval_steps is not None:
            return self._interval_steps
        steps, prompt_rows = head.kv_area / (self._limit.tokens or 1), head.num_prefill * (1 + head.num_siblings)
        num_workers = np.count_nonzero(self._limit.shares)
        uneven, bursts = num_workers * steps / max(1, head.decode_steps), prompt_rows / max(1, head.decode_steps)
        least = head.decode_steps / 32 if self._limit.is_strict else 1.0
        return max(1.0, least, num_workers * steps if uneven > bursts else steps)

    def _exceeds(self, waiting: list[Newcomer], forecast: LoadForecast) -> bool:
        """Return whether any coming step's load would exceed the limit if all of ``waiting`` started now."""
        cached = np.array([newcomer.num_prefill for newcomer in waiting])
        steps = np.array([newcomer.decode_steps for newcomer in waiting])
        members = np.array([1 + newcomer.num_siblings for newcomer in waiting])
        nowhere = np.zeros(members.sum(), np.int64)
        together = LoadForecast(nowhere, np.repeat(cached, members), np.repeat(steps, members), 1, token_budget=0)
        total = np.zeros(max(together.horizon, forecast.horizon))
        total[: forecast.horizon] += forecast.loads.sum(axis=0)
        total[: together.horizon] += together.loads[0]
        return bool(total.max() > (self._limit.tokens or 0))
