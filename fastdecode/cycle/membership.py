"""The companion of the steps that counts R-workers in and out, and moves sequences between them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fastdecode.core.errors import ConfigError, WorkerLostError
from fastdecode.core.metrics import PoolChanges
from fastdecode.core.types import StepReport
from fastdecode.cycle.contracts import JoinedWorker
from fastdecode.cycle.cycle import Companion, Cycle
from fastdecode.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Membership(Companion):
    """Between steps: R-workers that join are counted in, sequences move, and drained R-workers go.

    Sequences move as bytes, one by one, for at most as long as the step before took: so that the others wait at most
    twice as long for a token. ``changes``: what has become of the pool.
    """

    def __init__(self, now_seconds: float = 0.0, names: Iterable[str] = ()) -> None:
        """``now_seconds``: of the world's clock; ``names``: of the R-workers that are there, by index."""
        self.changes = PoolChanges()
        self._updated = now_seconds
        self._names = dict(enumerate(names))

    def before(self, cycle: Cycle) -> None:
        """Count newcomers in, move, and let drained R-workers go."""
        now, workers = cycle.world.now(), cycle.scheduler.store.workers
        self.admit(cycle)
        if len(workers) > 1:
            self._move_until(cycle, now + (now - self._updated))
        self.let_go(cycle)
        self._updated = cycle.world.now()

    def admit(self, cycle: Cycle) -> bool:
        """Count newcomers in; False if there are none."""
        newcomers = cycle.world.admit(cycle.scheduler.store.workers.vacant)
        for index, newcomer in newcomers.items():
            self._join(cycle.scheduler, index, newcomer)
        return bool(newcomers)

    def heard(self, cycle: Cycle, report: StepReport) -> None:
        """R-workers that ask to leave are drained."""
        self.changes.lost += len(report.lost)
        self._leaving(cycle.scheduler, report.leaving)

    def drain(self, scheduler: Scheduler, worker: int) -> None:
        """R-worker ``worker`` is to go. Raise ConfigError if it is not there."""
        if worker not in scheduler.store.workers.present:
            raise ConfigError(f"there is no R-worker {worker}; there are {scheduler.store.workers.present}")
        scheduler.members.drain(worker)

    def _leaving(self, scheduler: Scheduler, workers: Iterable[int]) -> None:
        for worker in sorted(set(workers) - set(scheduler.store.workers.draining)):
            logger.info("R-worker %s asks to leave: its sequences move", self._name(worker))
            scheduler.members.drain(worker)
            if not scheduler.store.workers.accepting:
                logger.warning("no other R-worker is there: %s is needed", self._name(worker))

    def _join(self, scheduler: Scheduler, index: int, newcomer: JoinedWorker) -> None:
        bandwidth = newcomer.bandwidth
        if bandwidth is None:
            known = [scheduler.store.workers.speeds.bandwidths[worker] for worker in scheduler.store.workers.present]
            bandwidth = sum(known) / len(known) if known else 1.0
        scheduler.members.join(newcomer.num_blocks, bandwidth, index, newcomer.host)
        self._names[index] = newcomer.name
        self.changes.joined += 1
        logger.info("R-worker %s has joined, with %d KV blocks", self._name(index), newcomer.num_blocks)

    def _name(self, worker: int) -> str:
        return self._names.get(worker) or str(worker)

    def _move_until(self, cycle: Cycle, deadline: float) -> None:
        """At least one sequence, if any is to move.

        One that was chosen before a loss came to light is not moved: its room, its source or itself may be gone, so the
        scheduler is asked again.
        """
        scheduler = cycle.scheduler
        while transfer := scheduler.transfers.next():
            if scheduler.store.workers.has_controls:
                cycle.tell()
            if not scheduler.transfers.stands(transfer):
                continue
            try:
                seconds = cycle.world.transfer(transfer)
            except WorkerLostError:
                return  # the next step finds out which one, and goes on without it
            scheduler.transfers.done(transfer, seconds)
            ends = not scheduler.transfers.stands(transfer)  # of several pieces perhaps
            self.changes.moved += transfer.is_move and ends
            self.changes.doubled += not transfer.is_move and ends
            if cycle.world.now() > deadline:
                return

    def let_go(self, cycle: Cycle) -> None:
        """R-workers that drain, and have nothing to do any more, go."""
        scheduler = cycle.scheduler
        if not scheduler.store.workers.draining:
            return
        if scheduler.members.drained() and scheduler.store.workers.has_controls:
            cycle.tell()
        for worker in scheduler.members.drained():
            logger.info("R-worker %s is let go", self._name(worker))
            cycle.world.dismiss(worker)
            self.changes.left += 1
            cycle.lose([worker])
