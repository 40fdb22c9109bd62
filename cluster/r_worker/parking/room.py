"""Memory of an R-worker's cache, committed before a chain that is read back needs it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from fastdecode import _rworker

SHARE = 0.1
"""Of one core's time at most, while an S-worker may take steps."""


class Room:
    """Has ``threads`` commit the blocks that come next, while nothing else is to be done there.

    A block is otherwise committed as it is first written, and for pages that no process had before that may take longer
    than to read from the disk what belongs there. Blocks are handed out lowest first, so the next ones are known.
    """

    def __init__(self, worker: _rworker.RWorker, threads: ThreadPoolExecutor) -> None:
        self._worker, self._threads = worker, threads
        self._stop = threading.Event()
        self._done: Future[None] | None = None
        self._end = 0

    def keep(self, num_bytes: int, at_once: bool = False) -> None:
        """From now on have memory for ``num_bytes`` more than is in use. ``at_once``: no S-worker takes steps yet."""
        self.stop()
        # At most so large a part of the cache is committed ahead of its use
        most_of_cache = 8
        ahead = min(-(-num_bytes // self._worker.block_bytes), self._worker.num_blocks // most_of_cache)
        if ahead:
            self._stop.clear()
            self._done = self._threads.submit(self._commit, ahead, at_once)

    def stop(self) -> None:
        """Something else is to be done there."""
        self._stop.set()
        if self._done:
            self._done.result()
            self._done = None

    def _commit(self, ahead: int, at_once: bool) -> None:
        # From the end of a job to what is committed for the next one: the steps that waited for that job go first
        rest_seconds = 0.2
        rest = 0.0 if at_once else rest_seconds
        while not self._stop.wait(rest):
            start = time.perf_counter()
            if not self._commit_chunk(ahead):
                rest, at_once = rest_seconds, False
            elif not at_once:
                rest = (time.perf_counter() - start) * (1 / SHARE - 1)

    def _commit_chunk(self, ahead: int) -> bool:
        """False if nothing is left to commit."""
        used = self._worker.blocks_touched
        first, end = max(used, self._end), min(used + ahead, self._worker.num_blocks)
        # Committed at a time: whoever has the thread stop waits for no more
        chunk_bytes = 1 << 18
        count = min(end - first, max(1, chunk_bytes // self._worker.block_bytes))
        if count <= 0:
            return False
        self._worker.commit_blocks(first, count)
        self._end = first + count
        return True
