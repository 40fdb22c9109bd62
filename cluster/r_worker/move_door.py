"""The frames by which an S-worker has an R-worker export and import sequences, on the R-worker's side."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.r_worker.audits import check_memory
from fastdecode.cluster.r_worker.host import block_bytes
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.messages import ALL_TOKENS, CHUNK_BYTES, EXPORT, IMPORT, NUM_BYTES
from fastdecode.core.errors import FrameError
from fastdecode.kinds.layout import KVLayout


@dataclass
class _Incoming:
    """Tokens of a sequence that arrive in pieces: uint8 [num_bytes], filled up to ``filled``."""

    sequence_id: int
    start: int
    num_tokens: int
    data: np.ndarray
    filled: int = 0


class MoveDoor:
    """Answers EXPORT, IMPORT and DATA of one session. ``has_imported``: True once an import has begun."""

    def __init__(self, link: Link, worker: _rworker.RWorker, layout: KVLayout) -> None:
        self._link, self._worker, self._layout = link, worker, layout
        self._incoming: _Incoming | None = None
        self.has_imported = False
        self.handlers: dict[Kind, Callable[[Frame], None]] = {
            Kind.EXPORT: self._export,
            Kind.IMPORT: self._import,
            Kind.DATA: self._data,
        }

    def abandon(self) -> None:
        """Drop a sequence whose bytes have not all arrived."""
        self._incoming = None

    def _export(self, frame: Frame) -> None:
        sequence_id, start, num_tokens = self._numbers(frame, EXPORT)
        check_memory(self._worker, sequence_id, -1)
        data = self._worker.export(sequence_id, start, None if num_tokens == ALL_TOKENS else num_tokens)
        self._link.send(Kind.EXPORTED, NUM_BYTES.pack(data.nbytes))
        for start in range(0, data.nbytes, CHUNK_BYTES):
            self._link.send(Kind.DATA, data[start : start + CHUNK_BYTES])

    def _import(self, frame: Frame) -> None:
        """Begin an import; check its announced sizes before memory is allocated."""
        sequence_id, start, num_tokens, num_bytes = self._numbers(frame, IMPORT)
        self.has_imported = True
        room = self._worker.blocks_free * block_bytes(self._layout, self._worker.block_size)
        if not 0 <= num_bytes <= room:
            raise ValueError(f"import: {num_tokens} tokens of {num_bytes:,} bytes, and {room:,} bytes are free")
        self._incoming = _Incoming(sequence_id, start, num_tokens, np.empty(num_bytes, np.uint8))
        self._link.send(Kind.READY)
        self._import_if_whole()

    def _data(self, frame: Frame) -> None:
        incoming, num_bytes = self._incoming, frame.lengths[0]
        if incoming is None or num_bytes > incoming.data.nbytes - incoming.filled or any(frame.lengths[1:]):
            raise FrameError(f"a DATA frame of {num_bytes:,} bytes that was not announced")
        self._link.read_into(incoming.data[incoming.filled : incoming.filled + num_bytes])
        incoming.filled += num_bytes
        self._import_if_whole()

    def _import_if_whole(self) -> None:
        incoming = self._incoming
        if incoming and incoming.filled == incoming.data.nbytes:
            self._incoming = None
            self._worker.import_(incoming.sequence_id, incoming.num_tokens, incoming.data, incoming.start)
            self._link.send(Kind.IMPORTED)

    def _numbers(self, frame: Frame, form: struct.Struct) -> tuple[int, ...]:
        data = self._link.body(frame, form.size)
        if len(data) != form.size:
            raise FrameError(f"a {frame.kind.name} frame of {len(data)} bytes, not {form.size}")
        return form.unpack(data)
