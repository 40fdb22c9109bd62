"""Lets the engine park prefixes on the disks of a pool's R-workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fastdecode.cluster.wire.frames import Kind
from fastdecode.cluster.wire.parked import (
    MAX_PARK_BYTES,
    WAKE,
    decode_chains,
    decode_parked,
    encode_park,
    encode_parking,
)
from fastdecode.core.parked import Chain, Parked

if TYPE_CHECKING:
    from fastdecode.cluster.pool.calls import Calls


class Disk(Protocol):
    """One R-worker's disk for parked prefixes: the methods of ``Parks``, with the errors of ``PoolWorker``."""

    def chains(self, model: str) -> list[Chain]: ...

    def park(self, patience_ms: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes]) -> Parked: ...

    def wake(self, patience_ms: int, sequence_id: int, num_blocks: int, name: bytes) -> Parked: ...


class RemoteDisk:
    """The ``Disk`` of an R-worker in another process."""

    def __init__(self, calls: Calls, block_size: int) -> None:
        self._calls, self._block_size = calls, block_size

    def chains(self, model: str) -> list[Chain]:
        return self._calls.ask(
            Kind.PARKING, encode_parking(model), Kind.CHAINS, lambda data: decode_chains(data, self._block_size)
        )

    def park(self, patience_ms: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes]) -> Parked:
        return self._parked(Kind.PARK, encode_park(patience_ms, sequence_id, chain, superseded))

    def wake(self, patience_ms: int, sequence_id: int, num_blocks: int, name: bytes) -> Parked:
        return self._parked(Kind.WAKE, WAKE.pack(patience_ms, sequence_id, num_blocks, name))

    def _parked(self, kind: Kind, body: bytes) -> Parked:
        return self._calls.ask(kind, body, Kind.PARKED, decode_parked, MAX_PARK_BYTES, spins=False)
