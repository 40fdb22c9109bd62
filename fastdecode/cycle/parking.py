"""The companion that parks unused prefixes on R-workers' disks, and loads them back when they are needed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from fastdecode.core.errors import BackendError, WorkerLostError
from fastdecode.core.parked import Chain, Parks, Progress
from fastdecode.core.types import RWorkerInfo
from fastdecode.cycle.cycle import Companion, Cycle
from fastdecode.scheduler import Scheduler, TokenSequence
from fastdecode.scheduler.places.workers import Prefix, WorkerState
from fastdecode.scheduler.prefix.parked import Beginning, Parked, Waking

BUSY_SECONDS, IDLE_SECONDS = 0.002, 0.05
"""Seconds per turn for loading and parking: while sequences run, and while none runs."""


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Disk:
    """The disk of an R-worker, valid as long as the scheduler's ``WorkerState`` at ``index`` is ``state``.
    ``wishes``: sequences that wait for parked prefixes, oldest first. ``waking``: the prefix that is being loaded for
    the first of them. ``parking``: the prefix that is being written, and its block hashes when writing began.
    """

    index: int
    state: WorkerState
    after_seconds: float
    wishes: deque[TokenSequence] = field(default_factory=deque)
    waking: Waking | None = None
    parking: tuple[Prefix, Chain] | None = None
    next_look: float = 0.0
    is_refusing: bool = False


class Parking(Companion):
    """Between steps: loads prefixes from R-workers' disks, then parks unused ones there, a little each time.
    ``parked_bytes``: by index of R-worker, bytes on its disk when it last reported.
    """

    def __init__(self, parks: Parks, model: str, r_workers: Sequence[RWorkerInfo]) -> None:
        """``model`` identifies the weights. ``r_workers``: all R-workers by index; the list grows as others join."""
        self.parked_bytes: dict[int, int] = {}
        self._parks, self._model, self._r_workers = parks, model, r_workers
        self._disks: dict[int, _Disk] = {}
        self._looked: set[int] = set()
        self._patience_ms = int(1000 * BUSY_SECONDS)
        self.rests = all(each.park_after is None for each in r_workers)

    def joined(self, worker: int) -> None:
        """Set ``rests`` to False if R-worker ``worker`` has a disk for prefixes."""
        if self._r_workers[worker].park_after is not None:
            self.rests = False

    def before(self, cycle: Cycle) -> None:
        """Load and park for ``BUSY_SECONDS``, or for ``IDLE_SECONDS`` if no sequence can run now."""
        scheduler, now = cycle.scheduler, cycle.world.now()
        scheduler.store.parked.set_clock(now)
        self._meet(scheduler)
        if not self._disks:
            return
        self._wish(scheduler)
        is_idle = not len(scheduler.store.residents) and len(scheduler.queue) == scheduler.queue.num_aside
        seconds = IDLE_SECONDS if is_idle else BUSY_SECONDS
        self._patience_ms = int(1000 * seconds)
        self._work(cycle, now + seconds, -1.0)

    def forget(self, sequence_id: int) -> None:
        """Let the disks be searched again if a sequence with this id waits later."""
        self._looked.discard(sequence_id)

    def finish(self, cycle: Cycle, most_seconds: float) -> None:
        """Park all unused prefixes when the engine ends, for at most ``most_seconds``."""
        self._meet(cycle.scheduler)
        for disk in self._disks.values():
            disk.next_look = 0.0
        deadline = cycle.world.now() + most_seconds
        self._work(cycle, deadline, 0.0)
        if left := sum(self._next(cycle.scheduler, each, deadline, 0.0) is not None for each in self._disks.values()):
            logger.warning("%d R-workers did not park everything within %g s", left, most_seconds)

    def renew(self, scheduler: Scheduler, model: str) -> None:
        """Continue with new weights, which ``model`` identifies. Prefixes parked with the old ones no longer match."""
        self._model = model
        for disk in list(self._disks.values()):
            self._drop(scheduler, disk)

    def _meet(self, scheduler: Scheduler) -> None:
        """Add the disks of new R-workers, and forget those of R-workers that are lost or replaced."""
        workers = scheduler.store.workers
        for disk in list(self._disks.values()):
            if workers[disk.index] is not disk.state:
                self._drop(scheduler, disk, is_gone=True)
        for index in workers.present:
            after = self._r_workers[index].park_after
            if after is not None and index not in self._disks:
                self._disks[index] = disk = _Disk(index, workers[index], after)
                self.parked_bytes[index] = 0
                try:
                    for chain in self._parks.chains(index, self._model):
                        scheduler.store.parked.chains.add(index, chain)
                except WorkerLostError:
                    return  # the next step reports the loss
                except BackendError as error:
                    self._refused(disk, error)

    def _wish(self, scheduler: Scheduler) -> None:
        """Set sequences aside that could continue from a parked prefix, until this is loaded."""
        parked = scheduler.store.parked
        if not len(parked.chains):
            return
        for sequence in list(islice(scheduler.queue, scheduler.limits.max_num_seqs)):
            if sequence.sequence_id in self._looked:
                continue
            self._looked.add(sequence.sequence_id)
            if beginning := parked.wanted(sequence):
                scheduler.queue.set_aside(sequence)
                self._disks[beginning.worker].wishes.append(sequence)

    def _work(self, cycle: Cycle, deadline: float, least_seconds: float) -> None:
        """Load and park on all disks in turn until ``deadline``, or until nothing is left to do; at least once.
        ``least_seconds``: how long a prefix must be unused to be parked; below 0, each R-worker's own setting applies.
        """
        has_work = True
        while has_work:
            has_work = False
            for disk in list(self._disks.values()):
                if disk.is_refusing:
                    continue
                try:
                    has_work |= self._wake(cycle, disk) or self._park(cycle, disk, least_seconds)
                except WorkerLostError:
                    return  # the next step reports the loss
                except BackendError as error:
                    self._refused(disk, error)
                    self._let_go(cycle.scheduler, disk)
            has_work &= cycle.world.now() < deadline

    def _wake(self, cycle: Cycle, disk: _Disk) -> bool:
        """Continue loading from ``disk``; return False if no sequence waits for one of its prefixes."""
        scheduler, parked = cycle.scheduler, cycle.scheduler.store.parked
        while disk.wishes and disk.waking is None:
            disk.waking = self._begin(scheduler, disk, parked)
            if disk.waking is None:
                scheduler.queue.come_back(disk.wishes.popleft())
        waking = disk.waking
        if waking is None:
            return False
        disk.parking = None  # the R-worker deletes a partly written prefix itself
        if scheduler.store.workers.has_controls:
            cycle.tell()  # releases that are not sent yet may free the blocks that loading needs
            if scheduler.store.workers[disk.index] is not disk.state:
                return False
        beginning = waking.beginning
        answer = self._parks.wake(
            disk.index, waking.prefix_id, beginning.num_blocks, beginning.chain.name, self._patience_ms
        )
        self.parked_bytes[disk.index], waking.num_tokens = answer.num_bytes, answer.num_tokens
        if answer.progress is Progress.UNDER_WAY:
            return True
        disk.waking, sequence = None, disk.wishes.popleft()
        if answer.progress is not Progress.DONE:
            parked.failed(waking)
        else:
            parked.woken(waking, sequence)
            if self._wish_next(scheduler, sequence, beginning):
                return True
        scheduler.queue.come_back(sequence)
        return True

    def _wish_next(self, scheduler: Scheduler, sequence: TokenSequence, before: Beginning) -> bool:
        """Let ``sequence`` wait for its prefix's next parked segment, on any disk; return False if there is none."""
        following = scheduler.store.parked.wanted(sequence) if scheduler.queue.is_aside(sequence) else None
        disk = self._disks.get(following.worker) if following and following.start > before.start else None
        if disk is None or disk.is_refusing:
            return False
        disk.wishes.append(sequence)
        return True

    def _begin(self, scheduler: Scheduler, disk: _Disk, parked: Parked) -> Waking | None:
        """Begin to load the prefix that the first waiting sequence needs.
        Return None if that sequence has ended, needs no prefix any more, or if there are too few free blocks.
        """
        sequence = disk.wishes[0]
        if not scheduler.queue.is_aside(sequence):
            return None
        beginning = parked.wanted(sequence)
        if beginning is None or beginning.worker != disk.index:
            return None
        return parked.begin(sequence, beginning)

    def _park(self, cycle: Cycle, disk: _Disk, least_seconds: float) -> bool:
        """Continue parking on ``disk``; return False if there is nothing to park."""
        scheduler, parked, now = cycle.scheduler, cycle.scheduler.store.parked, cycle.world.now()
        after = disk.after_seconds if least_seconds < 0 else least_seconds
        disk.parking = disk.parking or self._next(scheduler, disk, now, after)
        if disk.parking is None:
            return False
        prefix, chain = disk.parking
        if prefix.prefix_id not in disk.state.prefixes or len(prefix.blocks) != chain.num_blocks:
            disk.parking = None  # the prefix was evicted meanwhile
            return True
        if scheduler.store.workers.has_controls:
            cycle.tell()  # the FORK control that creates the prefix may not be sent yet
            if scheduler.store.workers[disk.index] is not disk.state:
                return False
        superseded = parked.superseded(prefix)
        answer = self._parks.park(disk.index, prefix.prefix_id, chain, superseded, self._patience_ms)
        self.parked_bytes[disk.index] = answer.num_bytes
        parked.dropped(disk.index, (*answer.dropped, *superseded))
        if answer.progress is not Progress.UNDER_WAY:
            disk.parking = None
            parked.parked(prefix, chain if answer.progress is Progress.DONE else None)
        return True

    def _next(self, scheduler: Scheduler, disk: _Disk, now: float, after: float) -> tuple[Prefix, Chain] | None:
        if now < disk.next_look:
            return None
        scheduler.store.parked.mark_parked(disk.index)
        found = scheduler.store.parked.next_to_park(disk.index, now - after if after else float("inf"))
        # Seconds between two searches for prefixes to park
        look_seconds = 0.25
        disk.next_look = 0.0 if found else now + look_seconds
        return found

    def _refused(self, disk: _Disk, error: BackendError) -> None:
        logger.warning("this R-worker no longer parks anything: %s", error)
        disk.is_refusing = True

    def _drop(self, scheduler: Scheduler, disk: _Disk, is_gone: bool = False) -> None:
        """Forget ``disk`` and the list of prefixes parked on it."""
        scheduler.store.parked.chains.forget(disk.index)
        self.parked_bytes.pop(disk.index, None)
        self._let_go(scheduler, disk, is_gone)
        del self._disks[disk.index]

    def _let_go(self, scheduler: Scheduler, disk: _Disk, is_gone: bool = False) -> None:
        """Let the sequences that wait for ``disk`` start without their prefixes.
        Release a partly loaded prefix, unless its R-worker ``is_gone``.
        """
        if disk.waking and not is_gone:
            scheduler.store.parked.failed(disk.waking)
        disk.waking = disk.parking = None
        while disk.wishes:
            if is_gone:
                self._looked.discard(disk.wishes[0].sequence_id)  # another R-worker's disk may have the prefix
            scheduler.queue.come_back(disk.wishes.popleft())
