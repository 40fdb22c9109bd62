"""An R-worker's KV port, where prefill workers store keys and values and read prefixes, concurrently with steps."""

from __future__ import annotations

import numpy as np

from fastdecode import _rworker
from fastdecode.api.settings import is_loopback
from fastdecode.cluster.links.port import Port, Reader
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.handshake import Security
from fastdecode.cluster.wire.messages import KV_ROWS, KV_STORED
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import FrameError
from fastdecode.core.machine import own_address
from fastdecode.kinds.layout import KVLayout

NICENESS = 10
"""Niceness that is added to the port's threads.

On a core shared with threads that attend, the port's threads get about a tenth of the time. Storing takes bursts of
some 10 ms per layer of a prompt, and a step must not become that much longer.
"""


class RowStore:
    """Handles the frames that arrive at a KV port, KV and READ.

    A KV frame brings rows, or a recurrent layer's state, of a sequence that is being stored; the answer is STORED. READ
    asks for cached tokens; the answer is a KV frame with their bytes in the cache's form.
    """

    def __init__(self, worker: _rworker.RWorker, layout: KVLayout) -> None:
        self._worker, self._layout = worker, layout
        self._layers, self._dtype = layout.layers, WIRE_DTYPE[layout.model_dtype]
        self._stored_bytes = [layer.token_bytes(layout.kv_dtype) for layer in layout.layers]

    def __call__(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        if frame.kind is Kind.READ:
            self._read(port, identity, frame, reader)
        elif frame.kind is Kind.KV:
            self._store(port, identity, frame, reader)
        else:
            raise FrameError(f"a {frame.kind.name} frame, which a KV port does not take")

    def _store(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        """Store the rows of ``frame``. Refuse rows of a sequence that the S-worker has not reserved, before reading."""
        job_id, start, num_rows = reader.record(KV_ROWS)
        self._worker.check_store(job_id, frame.layer, start, num_rows)
        layer = self._layers[frame.layer]
        if not layer.caches_rows:
            state = reader.array((self._layout.sequence_bytes(frame.layer),), np.dtype(np.uint8))
            self._worker.store_state(job_id, frame.layer, state)
            port.send(identity, Kind.STORED, KV_STORED.pack(job_id, frame.layer, start, num_rows))
            return
        k, v = (reader.array((num_rows, *shape), self._dtype) for shape in layer.row_shapes[1:3])
        self._worker.store(job_id, frame.layer, start, k, v)
        port.send(identity, Kind.STORED, KV_STORED.pack(job_id, frame.layer, start, num_rows))

    def _read(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        if any(frame.lengths[1:]):
            raise FrameError(f"a READ frame with parts of {frame.lengths} bytes; it takes one part")
        job_id, start, num_rows = reader.record(KV_ROWS)
        if frame.layer >= len(self._layers):
            raise FrameError(f"READ: layer is {frame.layer}; there are {len(self._layers)}")
        row_bytes = self._stored_bytes[frame.layer]
        # Most bytes of keys and values that one READ may ask for, which bounds how long other frames wait
        most_read_bytes = 1 << 21
        if not 0 < num_rows <= max(1, most_read_bytes // row_bytes):
            raise FrameError(f"READ: {num_rows} rows of {row_bytes:,} bytes; {most_read_bytes:,} bytes at most")
        stored = self._worker.read_prefix(job_id, frame.layer, start, num_rows)
        port.send(identity, Kind.KV, KV_ROWS.pack(job_id, start, num_rows), stored, layer=frame.layer)


class KvPort:
    """Listens for prefill workers, in its own thread that stores what they send.

    The thread sleeps while nothing comes, and releases Python's lock while it stores. Close the port before the
    R-worker. ``address``: "host:port" for prefill workers, without the host if it is the one at which the S-worker
    reaches this R-worker. ``epoch``: the epoch that frames to the port must carry.
    """

    def __init__(self, worker: _rworker.RWorker, layout: KVLayout, security: Security, host: str = "") -> None:
        """Listen at ``host``, or at all addresses if it is ""; only at loopback if the layout says so.

        Raise ValueError without a key if the port would be open beyond this machine, OSError if it cannot be opened.
        """
        bound = "127.0.0.1" if layout.kv_port == "loopback" else host or "*"
        if not is_loopback(bound) and security.secret is None:
            raise ValueError("a KV port that is open beyond this machine takes a --key-file")
        self._port = Port(bound, 0, security, RowStore(worker, layout), niceness=NICENESS)
        self.epoch = self._port.epoch
        known = bound if is_loopback(bound) else "" if host else own_address()
        self.address = f"{known}:{self._port.tcp_port}"

    def close(self) -> None:
        """Close the port and wait until its thread has ended; may be called twice."""
        self._port.close()
