"""An R-worker's answers to audits, and checks of cached tokens before sequences share them or they are exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.wire.auditing import MOST_QUESTIONS, QUESTION, decode_questions, encode_answers, with_queries
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.core.auditing import AuditAnswer, AuditMode, AuditQuestion, answer_bytes, query_bytes
from fastdecode.core.errors import DamagedError, FrameError
from fastdecode.core.types import Verb
from fastdecode.kinds.layout import KVLayout


def audited(worker: _rworker.RWorker, layout: KVLayout, asked: Sequence[AuditQuestion]) -> list[AuditAnswer]:
    """Return the answers of ``worker`` to ``asked``. Raise ValueError or KeyError for a row that is not cached.
    Before the first step, an empty ``asked`` makes ``worker`` keep checksums of full blocks.
    """
    if not asked:
        worker.keep_checksums()
    return [_answer(worker, layout, each) for each in asked]


def check_forks(worker: _rworker.RWorker, controls: np.ndarray) -> None:
    """Raise DamagedError if a prefix that ``controls`` fork has a block that differs from its checksum.
    ``controls``: CONTROL [num_controls]. Prefixes have negative ids. Running sequences need no check: they are audited.
    """
    for _, _, source, num_tokens in controls[controls["verb"] == Verb.FORK].tolist():
        if source < 0:
            check_memory(worker, source, num_tokens)


def check_memory(worker: _rworker.RWorker, sequence_id: int, num_tokens: int) -> None:
    """Raise DamagedError if blocks of the first ``num_tokens`` tokens differ from their checksums.
    An unknown sequence passes: earlier controls of the same step create it, or the caller refuses it.
    """
    try:
        block = worker.find_damage(sequence_id, num_tokens)
    except (KeyError, ValueError):
        return
    if block >= 0:
        raise DamagedError(
            f"its memory has changed: block {block} of cached sequence {sequence_id} differs from its checksum"
        )


def _answer(worker: _rworker.RWorker, layout: KVLayout, asked: AuditQuestion) -> AuditAnswer:
    is_damaged = worker.find_damage(asked.sequence_id, layer=asked.layer) >= 0
    found = np.zeros(0, np.uint8)
    if asked.mode in (AuditMode.ROWS, AuditMode.BLOCKS):
        found = worker.export_layer(asked.sequence_id, asked.layer, as_blocks=asked.mode is AuditMode.BLOCKS)
    elif asked.query is not None:
        again = worker.attend_again(asked.sequence_id, asked.layer, asked.position, int(asked.mode), asked.query)
        found = again.reshape(-1).view(np.uint8)
    if len(found) != (num_bytes := answer_bytes(layout, asked)):
        raise ValueError(f"audit: the answer has {len(found)} bytes, not {num_bytes}: other tokens are cached here")
    return AuditAnswer(is_damaged, found)


class AuditDoor:
    """Answers AUDIT frames over one session's R-worker. The first frame makes the R-worker keep checksums."""

    def __init__(self, link: Link, worker: _rworker.RWorker, layout: KVLayout) -> None:
        self._link, self._worker, self._layout = link, worker, layout
        self.handlers: Mapping[Kind, Callable[[Frame], None]] = {Kind.AUDIT: self._audit}

    def _audit(self, frame: Frame) -> None:
        asked = self._read(frame)
        self._link.send(Kind.AUDITED, *encode_answers(audited(self._worker, self._layout, asked)))

    def _read(self, frame: Frame) -> list[AuditQuestion]:
        """Read and return the questions in ``frame``; check its lengths before memory is allocated."""
        lengths = frame.lengths
        if lengths[0] > MOST_QUESTIONS * QUESTION.itemsize or lengths[2]:
            raise FrameError(f"an AUDIT frame with parts of {lengths} bytes; {MOST_QUESTIONS} questions at most")
        numbers = bytearray(lengths[0])
        self._link.read_into(numbers)
        asked = decode_questions(numbers, self._layout)
        if lengths[1] != sum(query_bytes(self._layout, each) for each in asked):
            raise FrameError(f"an AUDIT frame with parts of {lengths} bytes, which do not fit its questions")
        memory = np.empty(lengths[1], np.uint8)
        if lengths[1]:
            self._link.read_into(memory)
        return with_queries(asked, self._layout, memory)
