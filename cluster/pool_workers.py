"""One R-worker as the pool sees it: its protocol, one in this process, and one that is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.parking.directory import ParkDirectory
from fastdecode.cluster.parking.disks import Disk
from fastdecode.cluster.parking.parker import Parker
from fastdecode.cluster.r_worker.host import RWorkerSize, begin_step, end_step, host_id, make_rworker
from fastdecode.cluster.r_worker.session import open_kv_port
from fastdecode.cluster.routed_rows import Arrays
from fastdecode.cluster.wire.handshake import Security
from fastdecode.core.parked import ParkPlace
from fastdecode.core.types import KvAddress, RWorkerInfo, WorkerPlan, WorkerReport
from fastdecode.kinds.layout import KVLayout

if TYPE_CHECKING:
    from fastdecode.cluster.journal_copies import RemoteJournal
    from fastdecode.cluster.r_worker.kv_port import KvPort


class PoolWorker:
    """One R-worker as the pool sees it. The pool sends a slow request to all workers before it waits for any answer;
    where that comes at once there is nothing to wait for.

    Refusals are ValueError or KeyError with the reason, and change nothing; WorkerLostError names one that is lost.
    """

    name: str

    def open(self, layout: KVLayout) -> None:
        """Request caches for ``layout``."""
        raise NotImplementedError

    def opened(self) -> RWorkerInfo:
        """Wait for the answer to ``open``; CapacityError when its memory is too small."""
        raise NotImplementedError

    def begin_step(self, plan: WorkerPlan) -> None:
        """Send the plan of a step."""
        raise NotImplementedError

    def begun(self) -> None:
        """Wait for the answer to ``begin_step``."""

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        """Start one layer of one mini-batch with rows here; o is filled by the time ``wait`` returns.

        Arrays as in ``AttentionBackend.submit`` and ``collect``, this worker's rows only. Partial results: float32
        [rows, num_heads, 2 + output_dim], filled as ``_rworker.RWorker.submit`` says; None without such rows.
        """
        raise NotImplementedError

    def ready(self, mini_batch: int) -> bool:
        """True when ``wait`` would return at once."""
        raise NotImplementedError

    def wait(self, mini_batch: int) -> None:
        """Wait for the layer that was submitted for this mini-batch."""

    def share(self, mini_batch: int, layer: int, counts: np.ndarray) -> None:
        """Tell how many of what each row of a range ranked in index layer ``layer``, the last, is picked: int32 [rows
        of partial results, heads that pick], of a row's first node."""

    def end_step(self) -> None:
        """Ask the worker to commit the step."""

    def ended(self) -> WorkerReport:
        """Wait for the answer to ``end_step``; its ``transfer_seconds`` is 0."""
        raise NotImplementedError

    def abandon_step(self) -> None:
        """Forget the step; no effect where none was begun, and no error where the worker is lost."""

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        raise NotImplementedError

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        raise NotImplementedError

    @property
    def disk(self) -> Disk | None:
        """Where it parks; None where it has none."""
        return None

    @property
    def journal(self) -> RemoteJournal | None:
        """The session's journal there; None where it does not outlive this process, or keeps no session."""
        return None

    def break_off(self) -> None:
        """``close`` without a word to a process elsewhere, which may keep what it has."""
        self.close()

    def close(self) -> None:
        """Free everything; may be called twice."""


class InprocWorker(PoolWorker):
    """``PoolWorker`` over a C++ R-worker in this process, with its own threads; it answers every request at once.

    With ``waits_working`` and one mini-batch in a step, the S-worker's thread attends too, in ``wait``, in place of the
    R-worker's first thread: it would only sleep, and each hand-over between two threads on shared cores takes some
    0.1 ms. Besides, torch's threads start slowly after their caller has slept.
    """

    def __init__(
        self,
        name: str,
        size: RWorkerSize,
        block_size: int,
        own_cores: bool,
        waits_working: bool = False,
        security: Security | None = None,
        park: ParkPlace | None = None,
    ) -> None:
        """``own_cores``: the S-worker does not run on this worker's cores. ``security``: of its KV port, if any.
        ``park``: where it parks, if it does."""
        self.name = name
        self._park = ParkDirectory(park) if park else None
        self._parker: Parker | None = None
        self._security = security or Security()
        self._kv_port: KvPort | None = None
        self._size, self._block_size, self._own_cores = size, block_size, own_cores
        self._waits_working = waits_working
        self._postponed: tuple | None = None
        self._postpones = False
        self._worker: _rworker.RWorker | None = None
        self._in_step = False

    def open(self, layout: KVLayout) -> None:
        self._worker = make_rworker(layout, self._block_size, self._size)
        for layer, first, rows in layout.weight_parts():
            self._worker.set_weights(layer, first, rows)
        if layout.kv_port:
            self._kv_port = open_kv_port(self._worker, layout, self._security)
        if self._park and not layout.cannot("parking"):
            self._parker = Parker(self._worker, self._park, layout)

    def opened(self) -> RWorkerInfo:
        worker = self._open
        size = worker.num_blocks, worker.block_size, worker.num_threads
        info = RWorkerInfo(
            self.name, *size, worker.isa, self._own_cores, host=host_id(), state_blocks=worker.state_blocks,
            park_after=self._park.after_seconds if self._park and self._parker else None,
        )  # fmt: skip
        if self._kv_port is None:
            return info
        return replace(info, kv_ports=(KvAddress(self._kv_port.address, self._kv_port.epoch),))

    def begin_step(self, plan: WorkerPlan) -> None:
        begin_step(self._open, plan)
        self._in_step = True
        self._postpones = self._waits_working and len(plan.mini_batches) == 1

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        if self._postpones:
            self._postponed = mini_batch, layer, *arrays
        else:
            self._open.submit(mini_batch, layer, *arrays)

    def ready(self, mini_batch: int) -> bool:
        """See ``PoolWorker.ready``; what is postponed to ``wait`` gains nothing by waiting."""
        return self._postponed is not None or self._open.ready(mini_batch)

    def wait(self, mini_batch: int) -> None:
        if self._postponed is None:
            self._open.wait(mini_batch)
            return
        postponed, self._postponed = self._postponed, None
        self._open.run(*postponed)

    def share(self, mini_batch: int, layer: int, counts: np.ndarray) -> None:
        self._open.share(mini_batch, layer, counts)

    def ended(self) -> WorkerReport:
        report = end_step(self._open)
        self._in_step = False
        return report

    def abandon_step(self) -> None:
        self._postponed = None
        if self._in_step:
            self._in_step = False
            self._open.abandon_step()

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        return self._open.export(sequence_id, start, num_tokens)

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        self._open.import_(sequence_id, num_tokens, data, start)

    @property
    def disk(self) -> Disk | None:
        return self._parker

    def close(self) -> None:
        self._in_step = False
        if self._kv_port:
            self._kv_port.close()
        if self._parker:
            self._parker.close()
        if self._park:
            self._park.close()
        if self._worker:
            self._worker.close()

    @property
    def _open(self) -> _rworker.RWorker:
        if self._worker is None:
            raise ValueError("the R-worker is not open")
        return self._worker


class LostWorker(PoolWorker):
    """``PoolWorker`` in place of one that is lost or was dismissed: its rows read zeros, and it reports nothing."""

    def __init__(self, name: str, step_shape: tuple[int, int]) -> None:
        """``step_shape``: mini-batches and layers of the step."""
        self.name = name
        self._step_shape = step_shape

    def open(self, layout: KVLayout) -> None:
        raise ValueError("it is lost")

    def opened(self) -> RWorkerInfo:
        raise ValueError("it is lost")

    def begin_step(self, plan: WorkerPlan) -> None:
        self._step_shape = (len(plan.mini_batches), self._step_shape[1])

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        *_, o, partials = arrays
        o[...] = 0
        if partials is not None:
            partials[...] = (-np.inf, *(0.0,) * (partials.shape[2] - 1))

    def ready(self, mini_batch: int) -> bool:
        return True

    def ended(self) -> WorkerReport:
        return WorkerReport(np.zeros(self._step_shape), np.zeros(self._step_shape), 0.0, 0, 0)

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        raise ValueError("it is lost")

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        raise ValueError("it is lost")
