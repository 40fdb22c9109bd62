"""Memory of an R-worker's cache, committed before loading a chain needs it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from fastdecode import _rworker

SHARE = 0.1
"""Largest part of one core's time that committing memory may take while an S-worker takes steps."""


class Room:
    """Lets ``threads``, while idle, commit memory for the next blocks.

    Otherwise a block is committed when it is first written. For pages new to the system, that may take longer than
    reading the data from the disk. Blocks are handed out lowest first, so the next ones are known.
    """

    def __init__(self, worker: _rworker.RWorker, threads: ThreadPoolExecutor) -> None:
        self._worker, self._threads = worker, threads
        self._stop = threading.Event()
        self._done: Future[None] | None = None
        self._end = 0

    def keep(self, num_bytes: int, at_once: bool = False) -> None:
        """Keep memory committed for ``num_bytes`` beyond what is in use. ``at_once``: do not wait for steps."""
        self.stop()
        # At most 1 / ``most_of_cache`` of the cache is committed ahead of its use
        most_of_cache = 8
        ahead = min(-(-num_bytes // self._worker.block_bytes), self._worker.num_blocks // most_of_cache)
        if ahead:
            self._stop.clear()
            self._done = self._threads.submit(self._commit, ahead, at_once)

    def stop(self) -> None:
        """Stop committing, since other work comes."""
        self._stop.set()
        if self._done:
            self._done.result()
            self._done = None

    def _commit(self, ahead: int, at_once: bool) -> None:
        # Seconds from the end of a job to the next commit, so that waiting steps go first
        rest_seconds = 0.2
        rest = 0.0 if at_once else rest_seconds
        while not self._stop.wait(rest):
            start = time.perf_counter()
            if not self._commit_chunk(ahead):
                rest, at_once = rest_seconds, False
            elif not at_once:
                rest = (time.perf_counter() - start) * (1 / SHARE - 1)

    def _commit_chunk(self, ahead: int) -> bool:
        """Commit a chunk; return False if nothing is left to commit."""
        used = self._worker.blocks_touched
        first, end = max(used, self._end), min(used + ahead, self._worker.num_blocks)
        # Bytes committed at a time; ``stop`` waits for no more than one such commit
        chunk_bytes = 1 << 18
        count = min(end - first, max(1, chunk_bytes // self._worker.block_bytes))
        if count <= 0:
            return False
        self._worker.commit_blocks(first, count)
        self._end = first + count
        return True
