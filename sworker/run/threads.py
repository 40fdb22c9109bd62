"""Controls torch's threads on cores that they share with R-workers and other processes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

logger = logging.getLogger(__name__)

LOST_SECONDS = 3e-3
"""Seconds off its core, within one layer's model code, that show that the caller waited for a descheduled thread."""

LOSSES = 3, 16
"""(losses, calls): that many losses in that many calls reduce the threads. A busy process causes repeated losses."""

REST_SECONDS = 0.25, 16.0
"""Seconds with fewer threads before all are tried again: (the first time, most after failed trials)."""


def set_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)


def openmp_thread_ids(num_threads: int) -> list[int]:
    """Return the system's ids of the threads that compute torch's operations; the calling thread is the first.

    torch must use the OpenMP of GNU or LLVM; otherwise the list is empty.
    """
    openmp = ctypes.CDLL(None)
    ids: dict[int, int] = {}

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def note(_: object) -> None:
        ids[openmp.omp_get_thread_num()] = threading.get_native_id()

    try:
        openmp.GOMP_parallel(note, None, num_threads, 0)
    except AttributeError:
        return []
    return [ids[thread] for thread in sorted(ids)]


class SharedCores:
    """Lets torch use fewer threads while another process keeps a core busy.

    An operation ends when its last thread ends. A thread on a busy core waits for its time slice, some milliseconds in
    every operation, while the other threads sleep. The calling thread sleeps too, so its time off the CPU shows the
    loss. Without a busy process, threads spin through their short waits and stay on their cores.
    """

    def __init__(
        self,
        threads_now: Callable[[], int] = torch.get_num_threads,
        use_threads: Callable[[int], None] = set_threads,
        now: Callable[[], float] = time.perf_counter,
        cpu_now: Callable[[], float] = time.thread_time,
    ) -> None:
        """``now``, ``cpu_now``: clocks, in seconds, of elapsed time and of this thread's time on a core."""
        self._all = self.num_threads = threads_now()
        self._threads_now, self._use_threads, self._now, self._cpu_now = threads_now, use_threads, now, cpu_now
        self._started = 0.0
        self._cpu_started: float | None = None
        self._num_watched = LOSSES[1]
        self._losses: deque[bool] = deque(maxlen=LOSSES[1])
        self._rest_seconds = REST_SECONDS[0]
        self._rests_until = 0.0
        self._team_key: tuple[int, int] | None = None
        self._team_ids: list[int] = []

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Within the context, pin each of torch's threads to a core of its own, if there are as many threads as cores.

        The calling thread is one of them. Beside R-workers' threads, which are pinned too, Linux tends to wake two of
        torch's threads on one core, and leaves them there.
        """
        if self._threads_now() != self.num_threads:  # the user's program has changed torch's number of threads
            self._all = self.num_threads = self._threads_now()
        cores = sorted(os.sched_getaffinity(0))
        threads = self._team() if self.num_threads == len(cores) > 1 else []
        try:
            self._bind(threads, ([core] for core in cores))
            yield
        finally:
            self._bind(threads, itertools.repeat(cores))

    def _team(self) -> list[int]:
        """Return the ids of torch's threads. Finding them takes 60 µs, so they are cached."""
        key = threading.get_native_id(), self.num_threads
        if self._team_key != key:
            self._team_key, self._team_ids = key, openmp_thread_ids(self.num_threads)
        return self._team_ids

    def _bind(self, threads: Iterable[int], cores: Iterable[list[int]]) -> None:
        for thread, each in zip(threads, cores, strict=False):
            try:
                os.sched_setaffinity(thread, each)
            except ProcessLookupError:  # the thread has ended: torch uses fewer threads now
                self._team_key = None

    def start(self) -> None:
        """Record that model code starts. Use all threads again if the time with fewer threads is over."""
        self._started, self._cpu_started = self._now(), self._cpu_now() if self._num_watched else None
        if self.num_threads < self._all and self._started >= self._rests_until:
            self._use(self._all)

    def stop(self) -> None:
        """Record that model code ends. Use fewer threads if this thread repeatedly lost time to another process.

        Reading this thread's CPU time is slow: calls read it only at first, and after calls of over LOST_SECONDS.
        """
        if self.num_threads == 1:
            return
        now = self._now()
        seconds = now - self._started
        self._num_watched = LOSSES[1] if seconds > LOST_SECONDS else max(0, self._num_watched - 1)
        self._losses.append(seconds > LOST_SECONDS and self._is_loss(seconds))
        if sum(self._losses) >= LOSSES[0]:
            self._losses.clear()
            self._rest(now)

    def _is_loss(self, seconds: float) -> bool:
        """Return True if this thread is known to have lost much of the ``seconds`` since ``start``."""
        if self._cpu_started is None:
            return False
        lost = seconds - (self._cpu_now() - self._cpu_started)
        # If less than this fraction of the time is lost, one thread fewer would cost more
        lost_part = 0.3
        return lost > max(LOST_SECONDS, lost_part * seconds)

    def _rest(self, now: float) -> None:
        """Use an eighth fewer threads, at least one fewer, for a while.

        If such a while has only just ended, the next one is twice as long.
        """
        if self.num_threads == self._all:
            # A trial that ends within this time has failed
            trial_seconds = 1.0
            failed_at_once = now < self._rests_until + trial_seconds
            self._rest_seconds = min(2 * self._rest_seconds, REST_SECONDS[1]) if failed_at_once else REST_SECONDS[0]
        self._rests_until = now + self._rest_seconds
        self._use(self.num_threads - max(1, self.num_threads // 8))
        logger.info(
            "another process uses this one's cores: %d of %d threads for %g s",
            self.num_threads,
            self._all,
            self._rest_seconds,
        )

    def _use(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._team_key = None
        self._use_threads(num_threads)
