"""The companion that adds R-workers that join, removes those that leave, and moves sequences between R-workers."""

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
    """Between steps: adds R-workers that join, moves sequences, and removes drained R-workers.
    Sequences move one by one as bytes, for at most the duration of the last step. So other sequences wait at most twice
    as long for a token. ``changes``: counts of R-workers that joined, left or were lost, and of sequences that moved.
    """

    def __init__(self, now_seconds: float = 0.0, names: Iterable[str] = ()) -> None:
        """``now_seconds``: the time of the world's clock. ``names``: names of the present R-workers, by index."""
        self.changes = PoolChanges()
        self._updated = now_seconds
        self._names = dict(enumerate(names))

    def before(self, cycle: Cycle) -> None:
        now, workers = cycle.world.now(), cycle.scheduler.store.workers
        self.admit(cycle)
        if len(workers) > 1:
            self._move_until(cycle, now + (now - self._updated))
        self.let_go(cycle)
        self._updated = cycle.world.now()

    def admit(self, cycle: Cycle) -> bool:
        """Add R-workers that have joined; return False if there are none."""
        newcomers = cycle.world.admit(cycle.scheduler.store.workers.vacant)
        for index, newcomer in newcomers.items():
            self._join(cycle.scheduler, index, newcomer)
            for companion in cycle.companions:
                companion.joined(index)
        return bool(newcomers)

    def heard(self, cycle: Cycle, report: StepReport) -> None:
        """Drain the R-workers that ask to leave."""
        self.changes.lost += len(report.lost)
        self.changes.audited += report.num_audited
        self.changes.faulty += tuple(map(self._name, report.faulty))
        self.changes.undecided += report.is_doubtful and not report.faulty
        self._leaving(cycle.scheduler, report.leaving)

    def drain(self, scheduler: Scheduler, worker: int) -> None:
        """Begin to move the sequences of R-worker ``worker`` away. Raise ConfigError if there is no such R-worker."""
        if worker not in scheduler.store.workers.present:
            raise ConfigError(f"there is no R-worker {worker}; there are {scheduler.store.workers.present}")
        scheduler.members.drain(worker)

    def _leaving(self, scheduler: Scheduler, workers: Iterable[int]) -> None:
        for worker in sorted(set(workers) - set(scheduler.store.workers.draining)):
            logger.info("R-worker %s asks to leave: its sequences move", self._name(worker))
            scheduler.members.drain(worker)
            if not scheduler.store.workers.accepting:
                logger.warning("R-worker %s cannot leave: there is no other R-worker", self._name(worker))

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
        """Move sequences until ``deadline`` in the world's seconds, at least one; after a loss, seek other moves."""
        scheduler = cycle.scheduler
        while transfer := scheduler.transfers.begin_next():
            if scheduler.store.workers.has_controls:
                cycle.tell()
            if not scheduler.transfers.stands(transfer):
                continue
            try:
                seconds = cycle.world.transfer(transfer)
            except WorkerLostError:
                return  # the next step reports the loss
            scheduler.transfers.done(transfer, seconds)
            # A transfer is copied in pieces, one in each pass of this loop
            ends = not scheduler.transfers.stands(transfer)
            self.changes.moved += transfer.is_move and ends
            self.changes.doubled += not transfer.is_move and ends
            if cycle.world.now() > deadline:
                return

    def let_go(self, cycle: Cycle) -> None:
        """Remove draining R-workers that hold no sequences any more."""
        scheduler = cycle.scheduler
        if not scheduler.store.workers.draining:
            return
        if scheduler.members.drained() and scheduler.store.workers.has_controls:
            cycle.tell()
        for worker in scheduler.members.drained():
            logger.info("R-worker %s has left", self._name(worker))
            cycle.world.dismiss(worker)
            self.changes.left += 1
            cycle.lose([worker])
