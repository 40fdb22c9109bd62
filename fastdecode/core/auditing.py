"""Audits of R-workers: an R-worker computes some rows again, for comparison, and checks its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.types import SPLIT_TOKENS, SpanMode
from fastdecode.kinds.layout import KVLayout


class AuditMode(IntEnum):
    """The kinds of audits of a row by an R-worker.
    CHECK: compare blocks with their checksums, as all other kinds do too. ATTEND, PARTIAL, READ: attend again, as for a
    span of that SpanMode. ROWS: return the keys and values of one layer. BLOCKS: the same, with full blocks as
    they are stored.
    """

    CHECK = 0
    ATTEND = SpanMode.ATTEND
    PARTIAL = SpanMode.PARTIAL
    READ = SpanMode.READ
    ROWS = 4
    BLOCKS = 5

    @property
    def attends(self) -> bool:
        """True if the audit computes attention, so that the question needs a query."""
        return AuditMode.ATTEND <= self <= AuditMode.READ


@dataclass(frozen=True, eq=False)
class AuditQuestion:
    """An audit's question to an R-worker about one row in one layer of its sequence ``sequence_id``.
    ``position``: the row's position in that sequence, which may be a segment of a longer one. ``num_tokens``: how many
    tokens of it the R-worker stores, those of the open step included. ``query``: [1, num_heads, query_dim] in the
    model's dtype, if the mode attends.
    """

    mode: AuditMode
    sequence_id: int
    layer: int
    position: int
    num_tokens: int
    query: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class AuditAnswer:
    """An R-worker's answer to an audit. ``is_damaged``: blocks of the row's layer differ from their checksums.
    ``found``: o, partial results, or keys and values, as uint8 [num_bytes].
    """

    is_damaged: bool
    found: np.ndarray


def num_nodes(num_tokens: int) -> int:
    """Return how many partial results an R-worker makes for a row over a segment of ``num_tokens`` tokens."""
    return (-(-num_tokens // SPLIT_TOKENS)).bit_count()


def answer_bytes(layout: KVLayout, asked: AuditQuestion) -> int:
    """Return the size in bytes of ``AuditAnswer.found`` for ``asked``."""
    layer = layout.layers[asked.layer]
    match asked.mode:
        case AuditMode.CHECK:
            return 0
        case AuditMode.ROWS | AuditMode.BLOCKS:
            return asked.num_tokens * layer.token_bytes(layout.kv_dtype)
        case AuditMode.ATTEND:
            return math.prod(layer.row_shapes[3]) * WIRE_DTYPE[layout.model_dtype].itemsize
        case _:
            nodes = 1 if asked.mode is AuditMode.READ else num_nodes(asked.num_tokens)
            return 4 * nodes * math.prod(layer.partial_shape)


def query_bytes(layout: KVLayout, asked: AuditQuestion) -> int:
    """Return the size in bytes of the query of ``asked``; 0 in modes that do not attend."""
    elements = math.prod(layout.layers[asked.layer].row_shapes[0]) if asked.mode.attends else 0
    return elements * WIRE_DTYPE[layout.model_dtype].itemsize
