"""R-workers in the S-worker's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.remote_stores import Disk
from fastdecode.cluster.pool.routed_rows import Arrays
from fastdecode.cluster.pool.worker import PoolWorker
from fastdecode.cluster.r_worker.audits import audited, check_memory
from fastdecode.cluster.r_worker.host import RWorkerSize, begin_step, end_step, make_rworker, open_kv_port, weigh
from fastdecode.cluster.wire.handshake import Security
from fastdecode.core.auditing import AuditAnswer, AuditQuestion
from fastdecode.core.machine import host_id
from fastdecode.core.optional import optional
from fastdecode.core.parked import ParkPlace
from fastdecode.core.types import KvAddress, RWorkerInfo, WorkerPlan, WorkerReport
from fastdecode.core.weighing import Weighing
from fastdecode.kinds.layout import KVLayout


class InprocWorker(PoolWorker):
    """A ``PoolWorker`` over a C++ R-worker in this process, with its own threads. It answers requests at once.

    With ``waits_working`` and one mini-batch per step, the S-worker's thread attends in ``wait``, in place of the
    R-worker's first thread. The S-worker's thread would only sleep otherwise, and each hand-over between threads on
    shared cores takes some 0.1 ms. Also, torch's threads start slowly after their caller has slept.
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
        """``own_cores``: the S-worker does not run on this worker's cores.

        ``security``: for this worker's KV port. ``park``: the folder for its parked prefixes; None for no parking.
        """
        self.name = name
        self._park = optional("park directory").ParkDirectory(park) if park else None
        self._parker: Any = None
        self._security = security or Security()
        self._kv_port: Any = None
        self._size, self._block_size, self._own_cores = size, block_size, own_cores
        self._waits_working = waits_working
        self._postponed: tuple | None = None
        self._postpones = False
        self._worker: _rworker.RWorker | None = None
        self._in_step = False

    def open(self, layout: KVLayout) -> None:
        self._layout = layout
        self._worker = make_rworker(layout, self._block_size, self._size)
        for layer, first, rows in layout.weight_parts():
            self._worker.set_weights(layer, first, rows)
        if layout.kv_port:
            self._kv_port = open_kv_port(self._worker, layout, self._security)
        if self._park:
            self._parker = optional("parking").Parker(self._worker, self._park, layout)

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
        """See ``PoolWorker.ready``. A layer that ``wait`` computes itself counts as ready."""
        return self._postponed is not None or self._open.ready(mini_batch)

    def wait(self, mini_batch: int) -> None:
        if self._postponed is None:
            self._open.wait(mini_batch)
            return
        postponed, self._postponed = self._postponed, None
        self._open.run(*postponed)

    def share(self, mini_batch: int, layer: int, counts: np.ndarray) -> None:
        self._open.share(mini_batch, layer, counts)

    def weigh(self, asked: Weighing) -> Callable[[], np.ndarray]:
        found = weigh(self._open, asked)
        return lambda: found

    def audit(self, asked: Sequence[AuditQuestion]) -> Callable[[], list[AuditAnswer]]:
        found = audited(self._open, self._layout, asked)
        return lambda: found

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
        check_memory(self._open, sequence_id, -1)
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


class InprocBackend(PoolBackend):
    """An ``AttentionBackend`` over R-workers in this process, one per entry of ``sizes``, each with its own threads."""

    def __init__(
        self,
        sizes: Sequence[RWorkerSize],
        block_size: int,
        own_cores: bool = False,
        security: Security | None = None,
        park: ParkPlace | None = None,
    ) -> None:
        """``own_cores``: the S-worker does not run on the cores of ``sizes``.

        ``security``: for the R-workers' KV ports. ``park``: the folder of all R-workers' folders for parked prefixes.
        """
        waits_working = len(sizes) == 1 and not own_cores
        super().__init__(
            [
                InprocWorker(
                    f"inproc-{i}", size, block_size, own_cores, waits_working, security, park.of(i) if park else None
                )
                for i, size in enumerate(sizes)
            ]
        )
