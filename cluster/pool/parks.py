"""The disks of a pool's R-workers as ``Parks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdecode.cluster.pool.disks import Disk
from fastdecode.core.parked import Chain, Parked

if TYPE_CHECKING:
    from fastdecode.cluster.pool.backend import PoolBackend


class PoolParks:
    """The ``Parks`` of a pool's R-workers."""

    def __init__(self, pool: PoolBackend) -> None:
        self._pool = pool

    def chains(self, worker: int, model: str) -> list[Chain]:
        with self._pool.asked(worker, "park") as holder:
            return _disk(holder.disk).chains(model)

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes] = (), patience_ms: int = 2
    ) -> Parked:
        with self._pool.asked(worker, "park") as holder:
            return _disk(holder.disk).park(patience_ms, sequence_id, chain, superseded)

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int = 2) -> Parked:
        with self._pool.asked(worker, "wake") as holder:
            return _disk(holder.disk).wake(patience_ms, sequence_id, num_blocks, name)


def _disk(disk: Disk | None) -> Disk:
    if disk is None:
        raise ValueError("it has no disk to park on")
    return disk
