"""R-workers that come and go while an engine runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from fastdecode.core.errors import ConfigError, WorkerLostError
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import RWorkerInfo
from fastdecode.scheduler import Scheduler, Transfer

logger = logging.getLogger(__name__)


class Membership:
    """Between steps: R-workers that join are counted in, sequences move, and drained R-workers go.

    Sequences move as bytes, one by one, for at most as long as the step before took: so that the others wait at most
    twice as long for a token.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        scheduler: Scheduler,
        r_workers: list[RWorkerInfo],
        tell: Callable[[], object],
    ) -> None:
        """Those that join are entered in ``r_workers``. ``tell`` brings the scheduler's controls to the R-workers."""
        self._backend, self._scheduler, self._r_workers, self._tell = backend, scheduler, r_workers, tell
        self._updated = time.perf_counter()

    def update(self) -> None:
        """To be called before every step."""
        now = time.perf_counter()
        for index, info in self._backend.admit(self._scheduler.workers.vacant).items():
            self._join(index, info)
        self._move_until(now + (now - self._updated))
        for worker in self._scheduler.drained():
            logger.info("R-worker %s is let go", self._r_workers[worker].name)
            self._backend.dismiss(worker)
            self._scheduler.lost(worker)
        self._updated = time.perf_counter()

    def drain(self, worker: int) -> None:
        """R-worker ``worker`` is to go; ConfigError where it is not there."""
        if worker not in self._scheduler.workers.present:
            raise ConfigError(f"there is no R-worker {worker}; there are {self._scheduler.workers.present}")
        self._scheduler.drain(worker)

    def leaving(self, workers: Iterable[int]) -> None:
        """These R-workers have asked to go."""
        for worker in set(workers) - set(self._scheduler.workers.draining):
            logger.info("R-worker %s asks to leave: its sequences move", self._r_workers[worker].name)
            self._scheduler.drain(worker)
            if not self._scheduler.workers.accepting:
                logger.warning("no other R-worker is there: %s is needed", self._r_workers[worker].name)

    def _join(self, index: int, info: RWorkerInfo) -> None:
        known = [self._scheduler.workers.bandwidths[worker] for worker in self._scheduler.workers.present]
        measured = info.read_gb_per_s and all(worker.read_gb_per_s for worker in self._r_workers)
        bandwidth = info.read_gb_per_s if measured else sum(known) / len(known)
        self._scheduler.join(info.num_blocks, bandwidth, index, info.host)
        self._r_workers[index : index + 1] = [info]
        logger.info("R-worker %s has joined, with %d KV blocks", info.name, info.num_blocks)

    def _move_until(self, deadline: float) -> None:
        """At least one transfer, if any is wanted; each is asked for anew after R-workers were found lost."""
        while transfer := self._scheduler.next_transfer():
            start = time.perf_counter()
            try:
                if self._scheduler.has_controls:
                    self._tell()
                if not self._scheduler.stands(transfer):
                    continue
                self._copy(transfer)
            except WorkerLostError:
                return  # the next step finds out which one, and goes on without it
            now = time.perf_counter()
            self._scheduler.transferred(transfer, now - start)
            if now > deadline:
                return

    def _copy(self, transfer: Transfer) -> None:
        start, count = transfer.num_copied, transfer.num_tokens
        data = self._backend.export(transfer.source, transfer.cache_id, start, count)
        self._backend.import_(transfer.target, transfer.cache_id, count, data, start)
