"""The R-worker's side of frames about parking and waking."""

from __future__ import annotations

from collections.abc import Callable

from fastdecode import _rworker
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.r_worker.parking.directory import ParkDirectory
from fastdecode.cluster.r_worker.parking.parker import Parker
from fastdecode.cluster.r_worker.vitals import Vitals
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.cluster.wire.parked import (
    MAX_PARK_BYTES,
    WAKE,
    decode_park,
    decode_parking,
    decode_wake,
    encode_chains,
    encode_parked,
)
from fastdecode.core.parked import Parked
from fastdecode.kinds.layout import KVLayout


class ParkDoor:
    """Answers PARKING, PARK and WAKE of one session. ``vitals`` is told what is on the disk."""

    def __init__(
        self, link: Link, worker: _rworker.RWorker, directory: ParkDirectory, layout: KVLayout, vitals: Vitals
    ) -> None:
        self._link, self._directory, self._vitals = link, directory, vitals
        self._block_size = worker.block_size
        self._parker = Parker(worker, directory, layout)
        self.handlers: dict[Kind, Callable[[Frame], None]] = {
            Kind.PARKING: self._begin,
            Kind.PARK: self._park,
            Kind.WAKE: self._wake,
        }
        self._count()

    def close(self) -> None:
        """Cancel the work in progress. The R-worker must still be open."""
        self._parker.close()

    def _begin(self, frame: Frame) -> None:
        chains = self._parker.chains(decode_parking(self._link.body(frame, MAX_JSON_BYTES)))
        self._count()
        self._link.send(Kind.CHAINS, encode_chains(chains))

    def _park(self, frame: Frame) -> None:
        self._answer(self._parker.park(*decode_park(self._link.body(frame, MAX_PARK_BYTES), self._block_size)))

    def _wake(self, frame: Frame) -> None:
        self._answer(self._parker.wake(*decode_wake(self._link.body(frame, WAKE.size))))

    def _answer(self, parked: Parked) -> None:
        self._count()
        self._link.send(Kind.PARKED, encode_parked(parked))

    def _count(self) -> None:
        self._vitals.parked_chains, self._vitals.parked_bytes = self._directory.num_chains, self._directory.num_bytes
