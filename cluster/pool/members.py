"""The R-workers of a pool: opens, admits, dismisses and replaces them."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdecode.cluster.pool.audit import Audit
from fastdecode.cluster.pool.newcomers import Newcomers, Returns
from fastdecode.cluster.pool.worker import Joined, LostWorker, PoolWorker
from fastdecode.cluster.pool.worker_info import Arithmetic
from fastdecode.core.errors import NoRWorkerError, WorkerLostError
from fastdecode.core.optional import optional
from fastdecode.core.types import RWorkerInfo
from fastdecode.kinds.layout import KVLayout

if TYPE_CHECKING:  # most pools have no listener, and so need no ZeroMQ
    from fastdecode.cluster.pool.joining import JoinListener
    from fastdecode.cluster.pool.remote import RemoteWorker

logger = logging.getLogger(__name__)


class PoolMembers:
    """The R-workers of a pool by index. A lost R-worker keeps its index.

    ``joined``: names of the latest R-workers that joined after ``open``, in order. ``join_listener``: where R-workers
    join; None if they cannot.
    """

    def __init__(self, workers: Sequence[PoolWorker]) -> None:
        self.workers = list(workers)
        most_names = 1000
        self.joined: deque[str] = deque(maxlen=most_names)
        self.join_listener: JoinListener | None = None
        self._newcomers: Newcomers | None = None
        self._takes_back = False
        self._returns: Returns | None = None
        self._arithmetic = Arithmetic()
        self._layout = self._told = KVLayout((), "float32", "float32")
        self._keeper: Any = None
        self._parts: Any = None
        self._blocks: dict[int, tuple[int, int]] = {}
        self.audit = Audit()
        self._hosts: dict[str, str] = {}
        self._excluded: set[str] = set()
        self._step_shape = (0, 0)

    def accept_joins(self, listener: JoinListener) -> None:
        """Let R-workers join through ``listener``, which the pool closes. Call it before ``open``."""
        self.join_listener, self._newcomers = listener, Newcomers(listener)

    def take_back(self) -> None:
        """Reconnect to lost R-workers that can return, from now on. Call this before ``open``."""
        self._takes_back = True

    def keep_states(self, keeper: Any) -> None:
        """Let ``keeper``, a ``StateKeeper``, keep recurrent states in this process. Call this before ``open``."""
        self._keeper = keeper

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        self._layout = self._told = layout
        self._step_shape = (0, len(layout.layers))
        if self._keeper:
            self._parts = optional("state pairs").LayerParts.of(layout)
            self._told = self._parts.attention
        try:
            infos = self._open_all(self._told)
            for index, info in enumerate(infos):
                self.workers[index], infos[index] = self._with_states(self.workers[index], info)
        except BaseException:
            self._leave_unopened()
            raise
        self._blocks = {index: (info.num_blocks, info.num_blocks) for index, info in enumerate(infos)}
        self._arithmetic.add(infos)
        self._hosts = {info.name: info.host for info in infos}
        if self._newcomers:
            self._newcomers.open(self._told)
        return infos

    def exclude(self, name: str) -> None:
        """Bar the faulty R-worker ``name``, and every R-worker on its host, from joining again."""
        self._excluded |= {name, self._hosts.get(name, "") or name}
        if self._newcomers:
            self._newcomers.exclude(name)

    def _with_states(self, worker: PoolWorker, info: RWorkerInfo) -> tuple[PoolWorker, RWorkerInfo]:
        """Return ``worker`` and its ``info``, joined with this process's keeper of recurrent states if there is one."""
        if not self._keeper or not self._parts:
            return worker, info
        return self._keeper.pair(worker, info, self._parts)

    def _leave_unopened(self) -> None:
        """Close the pool after an R-worker could not be opened."""
        self.close()

    def _open_all(self, layout: KVLayout) -> list[RWorkerInfo]:
        """Open all R-workers of the pool concurrently; return their descriptions."""
        return self._open_some(list(self.workers), layout)

    def _open_some(self, workers: Sequence[PoolWorker], layout: KVLayout) -> list[RWorkerInfo]:
        """Open ``workers`` concurrently; return the descriptions of the workers that are not lost."""
        for worker in workers:
            with contextlib.suppress(WorkerLostError):  # ``opened`` raises it again
                worker.open(layout)
        return [info for worker in workers if (info := self._opened(worker))]

    def _opened(self, worker: PoolWorker) -> RWorkerInfo | None:
        """Wait until ``worker`` is open; return its description. None if it is lost and the pool opens without it."""
        try:
            return worker.opened()
        except WorkerLostError as error:
            if len(self.workers) == 1 or not self._may_miss(worker):
                raise
            logger.warning("%s; the others continue without it", error)
        worker.close()
        self.workers.remove(worker)
        self._expect(worker)
        return None

    def _may_miss(self, worker: PoolWorker) -> bool:
        """Return whether ``open`` continues without a lost ``worker``, since it may return."""
        return self._takes_back and self._anew(worker, False) is not None

    def _expect(self, gone: PoolWorker, is_last: bool = False) -> None:
        """Reopen the lost worker ``gone`` in the background, if it can return. ``is_last``: the pool is now empty."""
        gone = getattr(gone, "r_worker", gone)  # a ``StatePair`` cannot be reopened, only its R-worker
        if self._takes_back and (make := self._anew(gone, is_last)):
            self._returns = self._returns or Returns(self._told)
            self._returns.expect(make)

    @property
    def num_newcomers(self) -> int:
        """Number of R-workers that have joined and are not admitted yet."""
        return self._newcomers.num_waiting if self._newcomers else 0

    def admit(self, vacant: Sequence[int] = (), most: int | None = None) -> dict[int, RWorkerInfo]:
        """See ``AttentionBackend.admit``. ``most``: most R-workers to admit now; None for all."""
        found = self._returns.take() if self._returns else []
        if self._newcomers:
            found += self._newcomers.take(most)
        if not found:
            return {}
        infos: dict[int, RWorkerInfo] = {}
        for joined in found:
            if not self._may_enter(joined):
                continue
            index = vacant[len(infos)] if len(infos) < len(vacant) else len(self.workers)
            worker, info = self._with_states(joined.worker, joined.info)
            self.workers[index : index + 1] = [worker]
            self._blocks[index] = (info.num_blocks,) * 2
            self.joined.append(info.name)
            self._hosts[info.name] = info.host
            infos[index] = info
        self._arithmetic.add(list(infos.values()))
        return infos

    def _may_enter(self, joined: Joined) -> bool:
        """Return whether ``joined`` may enter the pool; else end its session and ignore its JOINs."""
        name, host = joined.info.name, joined.info.host
        is_excluded = bool(self._excluded & {name, host})
        if is_excluded:
            logger.error("R-worker %s may not join: an audit found its host at fault", name)
        if not is_excluded and self.audit.admits(joined):
            return True
        joined.worker.close()
        if self._newcomers:
            self._newcomers.exclude(name)
        return False

    def dismiss(self, worker: int) -> None:
        name = self._replace(worker)
        if self._newcomers:
            self._newcomers.dismiss(name)

    def give_up(self, worker: int) -> None:
        """Drop R-worker ``worker`` and its cached sequences; it may join again."""
        if isinstance(self.workers[worker], LostWorker):
            return
        name = self._replace(worker)
        if self._newcomers:
            self._newcomers.forget(name)

    def break_off(self) -> None:
        """Leave the R-workers as if this process were killed.

        So they keep their cached sequences for the next S-worker.
        """
        for worker in self.workers:
            worker.break_off()
        self.close()

    def close(self) -> None:
        for each in (self._newcomers, self._returns):
            if each:
                each.close()
        for worker in self.workers:
            worker.close()
        self.audit.close()
        self.workers = []

    @property
    def blocks_used(self) -> int:
        """Number of cache blocks in use on all R-workers together at the end of the last step."""
        return sum(num_blocks - free for num_blocks, free in self._blocks.values())

    def _none_left(self, message: str) -> WorkerLostError:
        """Return the error for a pool without R-workers: a NoRWorkerError if another may join or return."""
        may_come = self._takes_back and (self._newcomers or self._returns)
        return NoRWorkerError(message) if may_come else WorkerLostError(message)

    def _anew(self, gone: PoolWorker, is_last: bool) -> Callable[[], RemoteWorker] | None:
        """Return a function that makes a new client of the lost R-worker ``gone``; None if it is not reopened.

        The caller opens the new client repeatedly, until the R-worker answers.
        """
        return None

    def _replace(self, index: int) -> str:
        """Close worker ``index`` and put a ``LostWorker`` in its place; return its name."""
        gone = self.workers[index]
        gone.close()
        self.workers[index] = LostWorker(gone.name, self._step_shape)
        self._blocks[index] = (0, 0)
        return gone.name
