"""The policy that decides who computes a prompt: a chain of prefill workers, a single one, or the S-worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastdecode.core.remote_prefill import PrefillPart


class PrefillForecast(Protocol):
    """Predicts the times of a chain: prefill workers that compute consecutive parts of a prompt.
    ``speeds``: of each worker in order; 1 is the predicted speed. ``context_len``: tokens of a cached prefix to which
    the prompt attends.
    """

    def parts(self, num_tokens: int, speeds: Sequence[float], context_len: int = 0) -> tuple[int, ...]:
        """Return how many of the prompt's ``num_tokens`` tokens each worker computes; none computes 0."""

    def seconds(self, parts: Sequence[int], speeds: Sequence[float], context_len: int = 0) -> tuple[float, ...]:
        """Return the seconds from the prompt's start until each worker is done; the last is the time to first token."""


@dataclass(frozen=True)
class _PredictedPrompt:
    """A prompt that prefill workers compute.
    ``seconds``: predicted times until each part is done. ``paces``: the workers' speeds that this assumes.
    """

    parts: tuple[PrefillPart, ...]
    seconds: tuple[float, ...]
    paces: tuple[float, ...]
    handed_out_seconds: float

    def start(self, free: dict[int, float]) -> float:
        """Return when the prompt can start: once all its workers are free.
        ``free``: the time in seconds when each worker is free.
        """
        return max(self.handed_out_seconds, *(free.get(part.worker, 0.0) for part in self.parts))


@dataclass(frozen=True)
class _Option:
    """A possible division of a prompt among workers, with the seconds that all requests together wait because of it."""

    parts: tuple[PrefillPart, ...]
    waited_seconds: float


class LeastWaiting:
    """Sends a prompt where it makes all requests together wait least, in seconds.
    Three kinds of requests wait. The prompt itself waits until its first token. The prompts behind it wait for workers:
    the worker time that it takes, divided by the number of workers. Every decoding sequence waits while the S-worker
    computes the prompt. So a lone long prompt takes a chain of all workers, since nothing else waits for them. If many
    prompts wait, each takes one worker, because a chain of p takes more than a p-th of the time. A prompt stays on the
    S-worker if this can compute it before a prefill worker answers. As many prompts are taken to come behind this one
    as wait for workers now, since a queue keeps its length in the long run. Times are predicted (``forecast``) and
    corrected by the times of past prompts. A worker runs its jobs in order. ``s_seconds``: seconds of a prompt on the
    S-worker, by its tokens and the tokens of its cached prefix; infinite if the S-worker must not compute any.
    """

    def __init__(
        self,
        forecast: PrefillForecast,
        s_seconds: Callable[[int, int], float] = lambda num_tokens, context_len: float("inf"),
        workers: Iterable[int] = (),
    ) -> None:
        self._forecast, self._s_seconds = forecast, s_seconds
        self._pace = dict.fromkeys(workers, 1.0)
        self._jobs: dict[int, _PredictedPrompt] = {}
        self._known: dict[tuple[int, int, tuple[float, ...]], tuple[tuple[int, ...], tuple[float, ...]]] = {}
        self._idle_since: dict[int, float] = {}
        self._now = 0.0
        self._num_waiting = self._num_decoding = 0

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """``num_waiting``: prompts that have not begun; ``num_decoding``: sequences that get a token in each step."""
        self._now, self._num_waiting, self._num_decoding = now_seconds, num_waiting, num_decoding

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        on_s_worker = _Option((), self._s_seconds(num_tokens, context_len) * (1 + self._num_decoding))
        options = [on_s_worker, *self._chains(num_tokens, context_len)]
        return min(options, key=lambda option: option.waited_seconds).parts

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """Record that the prompt ``job_id`` was sent to prefill workers in ``parts``."""
        paces = tuple(self._pace.get(part.worker, 1.0) for part in parts)
        rows = [part.end - part.start for part in parts]
        seconds = self._forecast.seconds(rows, [_speed(pace) for pace in paces], parts[0].start)
        self._jobs[job_id] = _PredictedPrompt(parts, seconds, paces, self._now)
        self._num_waiting = max(self._num_waiting - 1, 0)

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """Record that the prompt ``job_id`` was computed, aborted, or failed; unknown ids are ignored."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        start = job.start(self._idle_since)
        for part, seconds, pace in zip(job.parts, job.seconds, job.paces, strict=True):
            predicted_end = start + seconds if computed else now_seconds
            last = part is job.parts[-1]
            self._idle_since[part.worker] = now_seconds if last else min(now_seconds, predicted_end)
            if computed and part.worker in self._pace:
                self._correct(part.worker, pace, (now_seconds - start) / job.seconds[-1])

    def joined(self, worker: int) -> None:
        """Use prefill worker ``worker`` too, with the predicted speed until a prompt shows another one."""
        self._pace[worker] = 1.0
        self._idle_since[worker] = self._now

    def lost(self, worker: int) -> None:
        """Stop using prefill worker ``worker``, which is lost."""
        self._pace.pop(worker, None)

    def backlog_seconds(self) -> dict[int, float]:
        """Return the predicted seconds until each prefill worker is free, by number."""
        return {worker: max(free - self._now, 0.0) for worker, free in self._free()[0].items()}

    def _chains(self, num_tokens: int, context_len: int) -> Iterator[_Option]:
        """Yield options for a prompt: chains of each length, of workers that become free at nearly the same time."""
        free, num_queued = self._free()
        waiting = max(self._num_waiting - 1, num_queued)
        order = sorted(free, key=lambda worker: (free[worker], self._pace[worker], worker))
        for size in range(1, min(len(order), num_tokens) + 1):
            for first in range(len(order) - size + 1):
                chosen = order[first : first + size]
                speeds = tuple(_speed(self._pace[worker]) for worker in chosen)
                rows, seconds = self._predict(num_tokens, context_len, speeds)
                start = free[chosen[-1]]
                taken = sum(start + end - free[worker] for worker, end in zip(chosen, seconds, strict=True))
                waited = start - self._now + seconds[-1] + waiting * taken / len(order)
                yield _Option(_parts(chosen, rows, context_len), waited)

    def _predict(
        self, num_tokens: int, context_len: int, speeds: tuple[float, ...]
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return how many tokens each worker of a chain with ``speeds`` computes, and the seconds until each is done.
        Predictions are cached by speeds.
        """
        asked = num_tokens, context_len, speeds
        # Most predictions that are cached
        most_known = 4096
        if asked not in self._known:
            if len(self._known) >= most_known:
                self._known.clear()
            rows = self._forecast.parts(num_tokens, speeds, context_len)
            self._known[asked] = rows, self._forecast.seconds(rows, speeds, context_len)
        return self._known[asked]

    def _free(self) -> tuple[dict[int, float], int]:
        """Return when each worker is free, in seconds, and how many prompts wait for a worker."""
        free, num_queued = dict(self._idle_since), 0
        for job in self._jobs.values():
            start = job.start(free)
            num_queued += start > self._now
            for part, seconds in zip(job.parts, job.seconds, strict=True):
                free[part.worker] = start + seconds
            last = job.parts[-1].worker
            free[last] = max(free[last], self._now)  # a prompt that takes longer than predicted still runs
        return {worker: max(free.get(worker, 0.0), self._now) for worker in self._pace}, num_queued

    def _correct(self, worker: int, pace: float, ratio: float) -> None:
        # Largest factor by which one prompt corrects a worker's speed, since a pause says little about the next prompt
        largest_correction = 4.0
        ratio = min(max(ratio, 1 / largest_correction), largest_correction)
        # Weight of one finished prompt in the estimate of its workers' speed
        gain = 0.2
        self._pace[worker] += gain * (pace * ratio - self._pace[worker])


def _speed(pace: float) -> float:
    # Speeds are rounded to multiples of this, so that prompts are not divided anew after each small change
    pace_step = 0.05
    return max(round(1 / pace / pace_step), 1) * pace_step


def _parts(workers: Sequence[int], rows: Sequence[int], start: int) -> tuple[PrefillPart, ...]:
    ends = (start + end for end in itertools.accumulate(rows))
    return tuple(PrefillPart(worker, end - n, end) for worker, n, end in zip(workers, rows, ends, strict=True))
