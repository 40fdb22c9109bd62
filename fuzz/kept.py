"""Parts that the session targets share: layouts, a reused R-worker, and a channel without a socket."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fastdecode.cluster.pool import remote
from fastdecode.cluster.r_worker import session
from fastdecode.cluster.r_worker.host import Host, RWorkerSize, make_rworker
from fastdecode.cluster.r_worker.parking.directory import ParkDirectory
from fastdecode.cluster.wire import messages
from fastdecode.cluster.wire.frames import HEADER, Kind
from fastdecode.cluster.wire.leases import AskedLease
from fastdecode.cluster.wire.messages import Hello
from fastdecode.core.errors import FrameError
from fastdecode.core.parked import ParkPlace
from fastdecode.core.types import Verb
from fastdecode.kinds import Absorption, Dense, Index, Latent
from fastdecode.kinds.layout import KVLayout

LAYOUTS = (
    KVLayout((Dense(4, 2, 8, 16, 0.3), Dense(4, 4, 16, 8, 0.3, window=9)), "float32", "float32"),
    KVLayout((Dense(2, 1, 32, 32, 0.2, soft_cap=2.0, sinks=(0.5, 1.0)),), "bfloat16", "int8"),
    KVLayout((Dense(8, 2, 64, 64, 0.1, alibi_slopes=(0.1,) * 8),) * 2, "float16", "int4"),
    KVLayout(
        (
            Index(3, 16, 0.3, picks=5),
            Latent(4, 1, 24, 16, 0.3, picked_by=0),
            Index(2, 16, 1.0, picks=2, pick_block=32, pick_local=1),
            Dense(4, 2, 16, 8, 0.3, picked_by=2),
        ),
        "bfloat16",
        "bfloat16",
    ),
    KVLayout((Latent(4, 1, 24, 16, 0.3, absorption=Absorption(8, 12)),), "bfloat16", "bfloat16"),
)
BLOCK_SIZE = 16
CACHE_BYTES = 1 << 19
PARK = ParkDirectory(ParkPlace(Path(tempfile.mkdtemp(dir="/dev/shm")), 1 << 18, 0.0))
atexit.register(shutil.rmtree, PARK.folder, ignore_errors=True)
HOST = Host(RWorkerSize(CACHE_BYTES, 1), "scalar", 1.0, "boot", (0,), PARK)
IDS = (0, 1, 2, 3, 4, 5, 9, -1, 1 << 62, -(1 << 63))
NUMBERS = (0, 1, 15, 16, 17, 40, 512, 1 << 20, (1 << 63) - 1, -1, -(1 << 63))
MOST_FRAMES = 40
LEASE = AskedLease("s", "a", "", 1.0)
HELLOS = {layout: messages.encode_hello(Hello("fuzzer", layout, BLOCK_SIZE, LEASE)) for layout in LAYOUTS}


class KeptWorker:
    """An R-worker that is emptied and reused instead of closed, since making a new one takes most of the time."""

    kept: ClassVar[dict[Any, list[KeptWorker]]] = {}

    def __init__(self, key: Any) -> None:
        self._key, self._worker = key, make_rworker(*key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    @classmethod
    def make(cls, *key: Any) -> KeptWorker:
        """Return an emptied R-worker with these arguments of ``make_rworker``, or make one."""
        kept = cls.kept.get(key)
        return kept.pop() if kept else cls(key)

    def close(self) -> None:
        """Release all sequences. Raise RuntimeError if blocks are then still in use."""
        with suppress(ValueError):
            self._worker.abandon_step()
        for sequence_id in IDS:
            with suppress(KeyError, ValueError):  # ValueError: the weights of latent layers are missing.
                self._worker.begin_step(np.array([[Verb.RELEASE, sequence_id, 0, 0]], np.int64), [])
                self._worker.end_step()
        left = self._worker.statistics()
        if left["sequences"] == 0 and (left["blocks_used"] or left["incoming"]):
            raise RuntimeError(f"{left['blocks_used']} blocks and {left['incoming']} jobs remain without a sequence")
        if left["sequences"]:
            self._worker.close()  # A sequence has an id outside IDS, so it cannot be released here.
        else:
            self.kept.setdefault(self._key, []).append(self)


class End(ConnectionError):
    """Ends a session when the fuzzer's bytes are used up."""


class FuzzChannel:
    """A ``Channel`` that makes each message when it is received, and records the kinds of the answers."""

    def __init__(self, make: Callable[[], list[bytes]]) -> None:
        self._make, self._parts = make, list[bytes]()
        self.answers: list[Kind] = []

    def send(self, parts: Sequence[Any]) -> None:
        self.answers.append(Kind(HEADER.unpack(bytes(parts[0]))[2]))

    def receive(self, timeout_seconds: float) -> bytes | None:
        """Make the next message, and return its first part."""
        self._parts = self._make()
        return self._parts.pop(0)

    def read_into(self, buffer: Any) -> None:
        """Copy the next part into ``buffer``, which must have the same length, as with libzmq."""
        view = memoryview(buffer)
        if not self._parts or len(self._parts[0]) != view.nbytes:
            raise FrameError("the part has another length")
        data = self._parts.pop(0)
        if view.nbytes:
            view.cast("B")[:] = data

    def close(self) -> None:
        """Do nothing."""


messages.fingerprint = remote.fingerprint = session.fingerprint = cache(messages.fingerprint)
remote.encode_hello = cache(messages.encode_hello)
session.make_rworker = KeptWorker.make  # type: ignore[assignment]
logging.disable(logging.CRITICAL)
