"""The stores of an R-worker in another process: its disk for parked prefixes, and its copy of the journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastdecode.cluster.pool.calls import Calls
from fastdecode.cluster.wire.frames import Kind
from fastdecode.cluster.wire.leases import FIRST_BYTE, MOST_JOURNAL_BYTES
from fastdecode.cluster.wire.messages import NUM_BYTES
from fastdecode.cluster.wire.parked import (
    MAX_PARK_BYTES,
    WAKE,
    decode_chains,
    decode_parked,
    encode_park,
    encode_parking,
)
from fastdecode.core.parked import Chain, Parked


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


class RemoteJournal:
    """A session's journal in the memory of an R-worker in another process. Errors are those of ``PoolWorker``.

    ``name``: the R-worker's name. ``host``: its machine as in ``RWorkerInfo``; "" before the R-worker is open.
    """

    def __init__(self, calls: Calls) -> None:
        self.name, self.host = calls.name, ""
        self._calls = calls
        self._num_bytes = 0

    @property
    def is_there(self) -> bool:
        """True if the R-worker's link is open and the R-worker is not known to be lost."""
        return self._calls.link is not None and not self._calls.lost

    def record(self, start: int, data: bytes) -> None:
        """Send bytes of the journal from byte ``start`` on; call ``recorded`` next.

        ``start`` is the journal's present length, or 0 to replace the journal.
        """
        self._calls.send(Kind.RECORD, FIRST_BYTE.pack(start), data)
        self._num_bytes = start + len(data)
        self._calls.owed = self.recorded

    def recorded(self) -> None:
        """Wait for the answer to ``record``, unless it was received already."""
        if self._calls.owed is None:
            return
        self._calls.owed = None
        num_bytes = self._calls.number(self._calls.answer(Kind.RECORDED, spins=False), NUM_BYTES)
        if num_bytes != self._num_bytes:
            raise self._calls.lose(f"the R-worker has {num_bytes:,} bytes of a journal of {self._num_bytes:,}")

    def recall(self) -> bytes:
        """Return the journal's bytes from the R-worker; empty if it has no journal."""
        return self._calls.ask(Kind.RECALL, b"", Kind.RECALLED, bytes, MOST_JOURNAL_BYTES)
