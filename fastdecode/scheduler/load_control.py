"""When the next sequence may start, so that the KV tokens attended per step stay even and within their limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fastdecode.errors import RequestError
from fastdecode.scheduler.load_forecast import LoadForecast, Prompt


def kv_area(prompt: Prompt) -> int:
    """KV tokens that a sequence attends over its life: Σ (p + k) over its decode steps k."""
    steps = prompt.decode_steps
    return (1 + prompt.num_siblings) * (prompt.num_prefill * steps + steps * (steps + 1) // 2)


class LoadControl:
    """FastDecode's load control (paper, section 4.2), for unequal lengths, prompts and arrivals.

    A newcomer starts where the forecast, with it, stays within the limit of its R-worker in every coming step. That
    alone would start one big wave: so while the waiting ones do not all fit at once, starts are spread as well. Each
    costs its KV area, and every step earns the limit, since in a steady state the area started per step is the mean
    load. Earnings are spent in micro-batches: every F steps as many sequences as F steps earn, which for equal lengths
    S and B in flight are the paper's M = B·F/S.

    ``limit``: KV tokens per step over all R-workers, shared in proportion to ``bandwidths``; None while unknown.
    ``is_strict``: the user's limit, never exceeded; else it is where R time equals S time, and what fits the free
    seats starts at once whatever the load, since nobody would gain by waiting.
    """

    def __init__(self, limit: int | None, bandwidths: Sequence[float], interval_steps: int | None = None) -> None:
        self.limit: int | None = limit
        self.is_strict = limit is not None
        self._longest = 0
        self._shares = np.array(bandwidths) / sum(bandwidths)
        self._interval_steps = interval_steps
        self._crowded = False
        self._earned = 0.0
        self._spending = False

    @property
    def limits(self) -> np.ndarray:
        """The limit of each R-worker, float64 [num_workers]; infinite while unknown."""
        return self._shares * (np.inf if self.limit is None else self.limit)

    def check(self, longest: int) -> None:
        """RequestError when a sequence of ``longest`` cached tokens can never run; a limit that is not strict grows."""
        needed = int(np.ceil(longest / self._shares.max()))
        if self.is_strict and longest > self.limits.max():
            raise RequestError(
                f"a sequence of {longest} cached tokens exceeds the largest R-worker's share, {int(self.limits.max())} "
                f"tokens, of the KV load limit {self.limit}: give a kv_load_limit of at least {needed}"
            )
        self._longest = max(self._longest, needed)
        self.limit = self.limit and max(self.limit, needed)

    def balance_at(self, kv_tokens: int) -> None:
        """R time was found to equal S time when each R-worker attends ``kv_tokens`` times its part of the speed."""
        self.limit = max(kv_tokens * int(np.count_nonzero(self._shares)), self._longest)

    def join(self, share: float) -> None:
        """One more R-worker, ``share`` times as fast as all others together: they keep their limits."""
        self._shares = np.append(self._shares, share) / (1 + share)
        if self.limit is not None:
            self.limit = int(self.limit * (1 + share))

    def lose(self, worker: int) -> None:
        """``worker`` is gone: the others keep their limits, and the total falls by its share."""
        kept = 1 - self._shares[worker]
        self._shares[worker] = 0
        self._shares /= kept
        if self.limit is not None:
            self.limit = int(self.limit * kept)

    def holds(self, worker: int, longest: int) -> bool:
        """Whether a sequence that may reach ``longest`` cached tokens can be on ``worker`` at all."""
        return not self.is_strict or longest <= self.limits[worker]

    def begin_step(
        self, waiting: Iterable[Prompt], fits_seats: bool, is_idle: bool, forecast: Callable[[], LoadForecast]
    ) -> None:
        """Earn a step's limit, or all that is missing where nobody runs.

        ``waiting``: those that the free seats could take now, in order, workers unknown; ``fits_seats``: they are all.
        """
        queue = iter(waiting)
        head = next(queue, None)
        if self.limit is None or head is None:
            self._crowded = False
            return
        if not self._crowded and (self.is_strict or not fits_seats):
            self._crowded = self._exceeds([head, *queue], forecast())
            is_idle = is_idle or self._crowded  # the first micro-batch starts at once
        interval = self._interval_steps or max(1, head.decode_steps // 32)
        enough = max(interval * self.limit, kv_area(head))
        self._earned = enough if is_idle else min(self._earned + self.limit, enough)
        self._spending = self._earned >= enough

    def affords(self, prompt: Prompt) -> bool:
        """Whether enough was earned for ``prompt`` to start in this step, on whichever worker."""
        return not self._crowded or (self._spending and self._earned >= kv_area(prompt))

    def fits(self, prompt: Prompt, forecast: Callable[[], LoadForecast]) -> bool:
        """Whether ``prompt``'s worker stays within its limit with it."""
        if self.limit is None or (not self._crowded and not self.is_strict):
            return True
        return forecast().peak_with(prompt) <= self.limits[prompt.worker]

    def fits_where(self, prompt: Prompt, forecast: Callable[[], LoadForecast]) -> np.ndarray:
        """The same for every R-worker, were ``prompt`` there: bool [num_workers]."""
        if self.limit is None or (not self._crowded and not self.is_strict):
            return np.ones(len(self._shares), bool)
        return forecast().peaks_with(prompt) <= self.limits

    def started(self, prompt: Prompt) -> None:
        """``prompt`` starts in this step."""
        if self._crowded:
            self._earned -= kv_area(prompt)

    def _exceeds(self, waiting: list[Prompt], forecast: LoadForecast) -> bool:
        """Whether all of ``waiting``, started now, would ever exceed the limit."""
        cached = np.array([prompt.num_prefill for prompt in waiting])
        steps = np.array([prompt.decode_steps for prompt in waiting])
        members = np.array([1 + prompt.num_siblings for prompt in waiting])
        nowhere = np.zeros(members.sum(), np.int64)
        together = LoadForecast(nowhere, np.repeat(cached, members), np.repeat(steps, members), 1, token_budget=0)
        total = np.zeros(max(together.horizon, forecast.horizon))
        total[: forecast.horizon] += forecast.loads.sum(axis=0)
        total[: together.horizon] += together.loads[0]
        return bool(total.max() > self.limit)
