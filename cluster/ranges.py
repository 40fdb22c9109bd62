"""Sequences that attend in ranges: queries go to every R-worker that has a range, and partial results are merged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.wire.payload import node_widths, row_counts
from fastdecode.types import SPLIT_TOKENS, KVLayout, SpanMode

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
"""q, k, v, o and partial results, as ``PoolWorker.submit`` takes them."""


class _Sequence(NamedTuple):
    """Rows of o, and what they are merged from, in token order: (worker, first row of its partial results, rows from
    one row to the next, first split, splits)."""

    row: int
    num_rows: int
    parts: list[tuple[int, int, int, int, int]]


class RangeRows:
    """One mini-batch in which sequences attend in ranges: what each R-worker gets, and what its answer is part of."""

    def __init__(self, layout: KVLayout, gathers: np.ndarray, spans: Sequence[np.ndarray]) -> None:
        """``gathers``: GATHER [num_partial_results]; ``spans``: of each R-worker, SPAN [num_spans]."""
        self._layout = layout
        self._num_partials = [row_counts(each).partials for each in spans]
        self._num_outputs = [row_counts(each).outputs for each in spans]
        reads = [int(each["num_rows"][each["mode"] == SpanMode.READ].sum()) for each in spans]
        self._copied: list[list[np.ndarray]] = [[] for _ in spans]
        self._sequences = _sequences(gathers, reads, self._copied)
        self._rows = [np.concatenate(each) if each else np.zeros(0, np.int64) for each in self._copied]
        self._lost: list[_Sequence] = []
        self._buffers: dict[tuple[int, int, int, str], np.ndarray] = {}
        self._make_tables()

    def num_copied(self, worker: int) -> int:
        """Rows of q that an R-worker gets for its closed ranges."""
        return len(self._rows[worker])

    def arrays(
        self, worker: int, layer: int, q: np.ndarray, own: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray
    ) -> Arrays:
        """What ``PoolWorker.submit`` takes: ``q`` is all of the mini-batch, the others the R-worker's own rows."""
        copied = self._rows[worker]
        if len(copied):
            both = self._buffer(worker, len(copied) + len(own), q.shape[1], q.shape[2], q.dtype)
            np.take(q, copied, axis=0, out=both[: len(copied)], mode="clip")  # which needs no copy in between
            both[len(copied) :] = own
            own = both
        partials = self._partials(worker, layer) if self._num_partials[worker] else None
        return own, k, v, o[: self._num_outputs[worker]], partials

    def lose(self, worker: int) -> None:
        """R-worker ``worker`` is lost: rows that it has a range of are zeros from now on."""
        for sequence in self._sequences:
            if any(part[0] == worker for part in sequence.parts):
                self._lost.append(sequence)
        self._sequences = [each for each in self._sequences if all(part[0] != worker for part in each.parts)]
        self._make_tables()

    def merge(self, layer: int, o: np.ndarray, isa: str) -> None:
        """Fill ``o`` [attending rows, num_heads, value_head_dim] where sequences attend in ranges, in the arithmetic
        of ``isa``."""
        for sequence in self._lost:
            o[sequence.row : sequence.row + sequence.num_rows] = 0
        if self._sequences:
            partials = [self._partials(worker, layer) for worker in range(len(self._rows))]
            sinks = self._layout.layers[layer].sinks
            _rworker.merge_partials(partials, self._parts, self._spans, sinks, o, self._layout.model_dtype, isa)

    def _make_tables(self) -> None:
        parts = [part for sequence in self._sequences for part in sequence.parts]
        spans, first = [], 0
        for sequence in self._sequences:
            spans.append((sequence.row, sequence.num_rows, first, len(sequence.parts)))
            first += len(sequence.parts)
        self._parts = np.array(parts, np.int64).reshape(-1, 5)
        self._spans = np.array(spans, np.int64).reshape(-1, 4)

    def _partials(self, worker: int, layer: int) -> np.ndarray:
        spec = self._layout.layers[layer]
        shape = self._num_partials[worker], spec.num_heads, 2 + spec.value_head_dim
        return self._buffer(worker, *shape, np.dtype(np.float32), "partials")

    def _buffer(
        self, worker: int, num_rows: int, heads: int, dim: int, dtype: np.dtype, what: str = "queries"
    ) -> np.ndarray:
        """One per R-worker and shape of head, reused by its layers."""
        key = worker, heads, dim, what
        if key not in self._buffers:
            self._buffers[key] = np.empty((num_rows, heads, dim), dtype)
        return self._buffers[key]


def _sequences(gathers: np.ndarray, reads: Sequence[int], copied: list[list[np.ndarray]]) -> list[_Sequence]:
    """What ``gathers`` say. Appends to ``copied`` which rows of q each R-worker gets for closed ranges.

    An R-worker's partial results begin with those of its closed ranges, ``reads`` rows; then come those of tails.
    """
    next_read, next_tail = [0] * len(reads), list(reads)
    sequences = []
    for (row, num_rows), pieces in groupby(gathers.tolist(), key=lambda piece: piece[:2]):
        *closed, (_, _, tail_worker, base, end) = pieces
        parts = []
        for _, _, worker, start, stop in closed:
            copied[worker].append(np.arange(row, row + num_rows))
            parts.append((worker, next_read[worker], 1, start // SPLIT_TOKENS, (stop - start) // SPLIT_TOKENS))
            next_read[worker] += num_rows
        split, widths = base // SPLIT_TOKENS, node_widths(end - base)
        for node, width in enumerate(widths):
            parts.append((tail_worker, next_tail[tail_worker] + node, len(widths), split, width))
            split += width
        next_tail[tail_worker] += num_rows * len(widths)
        sequences.append(_Sequence(row, num_rows, parts))
    return sequences
