"""Answers an S-worker's questions (WEIGH) about a query's attention weights per block of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.r_worker.host import weigh
from fastdecode.cluster.wire.frames import FRAME_LIMIT, Frame, Kind
from fastdecode.cluster.wire.weighing import (
    MOST_NUMBER_BYTES,
    decode_numbers,
    num_heads_of,
    num_query_bytes,
    queries_of,
)
from fastdecode.core.errors import FrameError
from fastdecode.core.weighing import Weighing
from fastdecode.kinds.layout import KVLayout


class WeighDoor:
    """Answers WEIGH frames over one session's R-worker."""

    def __init__(self, link: Link, worker: _rworker.RWorker, layout: KVLayout) -> None:
        self._link, self._worker, self._layout = link, worker, layout
        self.handlers: Mapping[Kind, Callable[[Frame], None]] = {Kind.WEIGH: self._weigh}

    def _weigh(self, frame: Frame) -> None:
        self._link.send(Kind.WEIGHED, weigh(self._worker, self._read(frame)))

    def _read(self, frame: Frame) -> Weighing:
        """Read and return the question in ``frame``; check its lengths before memory is allocated."""
        lengths, layout = frame.lengths, self._layout
        if lengths[0] > MOST_NUMBER_BYTES or lengths[1] > FRAME_LIMIT:
            raise FrameError(f"a WEIGH frame with parts of {lengths} bytes; {MOST_NUMBER_BYTES:,} of numbers at most")
        numbers = bytearray(lengths[0])
        self._link.read_into(numbers)
        asked = decode_numbers(numbers, layout)
        norms = np.zeros((1, num_heads_of(layout, asked.layers), 2), np.float32)
        if lengths[1] != num_query_bytes(layout, asked.layers) or lengths[2] not in (0, norms.nbytes):
            raise FrameError(f"a WEIGH frame with parts of {lengths} bytes, which do not fit its layers")
        memory = np.empty(lengths[1], np.uint8)
        self._link.read_into(memory)
        asked = replace(asked, queries=queries_of(layout, asked.layers, memory))
        if not lengths[2]:
            return asked
        self._link.read_into(norms)
        return replace(asked, norms=norms)
