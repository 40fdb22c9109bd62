"""Answers an S-worker's questions (AUDIT) about rows that this R-worker computed or stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.r_worker.audits import audited
from fastdecode.cluster.wire.auditing import MOST_NUMBER_BYTES, decode_questions, encode_answers, with_queries
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.core.auditing import AuditQuestion, query_bytes
from fastdecode.core.errors import FrameError
from fastdecode.kinds.layout import KVLayout


class AuditDoor:
    """Answers AUDIT frames over one session's R-worker. The first frame makes it keep checksums of blocks."""

    def __init__(self, link: Link, worker: _rworker.RWorker, layout: KVLayout) -> None:
        self._link, self._worker, self._layout = link, worker, layout
        self.handlers: Mapping[Kind, Callable[[Frame], None]] = {Kind.AUDIT: self._audit}

    def _audit(self, frame: Frame) -> None:
        asked = self._read(frame)
        self._link.send(Kind.AUDITED, *encode_answers(audited(self._worker, self._layout, asked)))

    def _read(self, frame: Frame) -> list[AuditQuestion]:
        """Read and return the questions in ``frame``; check its lengths before memory is allocated."""
        lengths = frame.lengths
        if lengths[0] > MOST_NUMBER_BYTES or lengths[2]:
            raise FrameError(f"an AUDIT frame with parts of {lengths} bytes")
        numbers = bytearray(lengths[0])
        self._link.read_into(numbers)
        asked = decode_questions(numbers, self._layout)
        if lengths[1] != sum(query_bytes(self._layout, each) for each in asked):
            raise FrameError(f"an AUDIT frame with parts of {lengths} bytes, which do not fit its questions")
        memory = np.empty(lengths[1], np.uint8)
        if lengths[1]:
            self._link.read_into(memory)
        return with_queries(asked, self._layout, memory)
