"""Encodes, decodes and checks the frames AUDIT and AUDITED."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastdecode.cluster.wire.frames import FRAME_LIMIT
from fastdecode.core.auditing import AuditAnswer, AuditMode, AuditQuestion, answer_bytes, query_bytes
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import FrameError
from fastdecode.kinds.layout import KVLayout

QUESTION = np.dtype([(name, "<i8") for name in ("mode", "sequence_id", "layer", "position", "num_tokens")])
"""A question in the first part of AUDIT; queries are in the second part."""

MOST_QUESTIONS = 256


def encode_questions(asked: Sequence[AuditQuestion]) -> list[bytes | np.ndarray]:
    """Return the parts of AUDIT: the numbers of each question, and all queries."""
    numbers = [(int(each.mode), each.sequence_id, each.layer, each.position, each.num_tokens) for each in asked]
    queries = [each.query.reshape(-1) for each in asked if each.query is not None]
    parts: list[bytes | np.ndarray] = [np.array(numbers, QUESTION).tobytes()]
    return [*parts, np.concatenate(queries)] if queries else parts


def decode_questions(data: bytes | bytearray, layout: KVLayout) -> list[AuditQuestion]:
    """Return the questions in AUDIT's first part, without queries. Raise FrameError for impossible values."""
    max_tokens = 1 << 40
    if len(data) % QUESTION.itemsize or len(data) > MOST_QUESTIONS * QUESTION.itemsize:
        raise FrameError(f"AUDIT: {len(data)} bytes of numbers; a question has {QUESTION.itemsize} bytes")
    audited, asked = set(layout.audited_layers), []
    for mode, sequence_id, layer, position, num_tokens in np.frombuffer(data, QUESTION).tolist():
        if not 0 <= mode <= max(AuditMode):
            raise FrameError(f"AUDIT: mode {mode} is unknown; it must be 0 to {max(AuditMode):d}")
        if layer not in audited:
            raise FrameError(f"AUDIT: layer {layer} does not exist, or has no rows to audit")
        if not 0 <= position <= max_tokens or not 1 <= num_tokens <= max_tokens:
            raise FrameError(f"AUDIT: position must be 0 to {max_tokens:,}, and num_tokens 1 to {max_tokens:,}")
        if mode in (AuditMode.ATTEND, AuditMode.PARTIAL) and position >= num_tokens:
            raise FrameError(f"AUDIT: a row at position {position} of {num_tokens} tokens")
        asked.append(AuditQuestion(AuditMode(mode), sequence_id, layer, position, num_tokens))
    if (num_bytes := sum(answer_bytes(layout, each) for each in asked)) > FRAME_LIMIT:
        raise FrameError(f"AUDIT: its answer has {num_bytes:,} bytes; {FRAME_LIMIT:,} at most")
    return asked


def with_queries(asked: Sequence[AuditQuestion], layout: KVLayout, memory: np.ndarray) -> list[AuditQuestion]:
    """Return the questions ``asked`` with their queries, which are views of ``memory``, uint8."""
    start, found = 0, []
    for each in asked:
        count = query_bytes(layout, each)
        query = memory[start : start + count].view(WIRE_DTYPE[layout.model_dtype]) if count else None
        shape = (1, *layout.layers[each.layer].row_shapes[0])
        found.append(each if query is None else replace(each, query=query.reshape(shape)))
        start += count
    return found


def encode_answers(answers: Sequence[AuditAnswer]) -> list[np.ndarray]:
    """Return the parts of AUDITED: for each question whether blocks are damaged, uint8; and all bytes found."""
    damaged = np.array([each.is_damaged for each in answers], np.uint8)
    found = [each.found for each in answers if len(each.found)]
    return [damaged, found[0] if len(found) == 1 else np.concatenate([np.zeros(0, np.uint8), *found])]


def decode_answers(
    damaged: np.ndarray, found: np.ndarray, asked: Sequence[AuditQuestion], layout: KVLayout
) -> list[AuditAnswer]:
    """Return the answers to ``asked`` in the parts of AUDITED. Raise FrameError for impossible values."""
    if damaged.max(initial=0) > 1:
        raise FrameError("AUDITED: whether blocks are damaged must be 0 or 1")
    ends = np.cumsum([answer_bytes(layout, each) for each in asked], dtype=np.int64)
    pieces = np.split(found, ends[:-1]) if asked else []
    return [AuditAnswer(bool(flag), piece) for flag, piece in zip(damaged.tolist(), pieces, strict=True)]
