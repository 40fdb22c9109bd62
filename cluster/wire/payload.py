"""The messages of each step: its plan, its report, and the payload.

One block of memory holds q, k, v, o and partial results of every mini-batch. Its layout follows from the plan.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastdecode.cluster.wire.messages import MAX_ROWS
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import FrameError
from fastdecode.core.routes import node_widths
from fastdecode.core.types import CONTROL, SPAN, SpanMode, WorkerPlan, WorkerReport
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout

ALIGNMENT = 64
"""Bytes of a cache line."""

_COUNTS = struct.Struct("<QQ")
_REPORT = struct.Struct("<qqQ")

Views = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class RowCounts(NamedTuple):
    """Numbers of one R-worker's rows in a mini-batch: rows of q, of k and v, of o, and of partial results.

    ``own``: rows that the R-worker stores and that attend, whether their results are partial or not.
    """

    queries: int
    stored: int
    outputs: int
    partials: int = 0
    own: int = 0

    def of(self, layer: Layer) -> RowCounts:
        """Return the numbers of rows in ``layer``; a recurrent layer gets own rows only, and answers each of them."""
        return self if layer.caches_rows else RowCounts(self.own, self.stored, self.own)


class PayloadSlots:
    """One slot per mini-batch, large enough for its largest layer. Both ends of a link compute the same places.

    ``rows``: the rows of each mini-batch on this R-worker.
    """

    def __init__(self, layout: KVLayout, rows: Sequence[RowCounts]) -> None:
        self._layers, self._dtype, self._rows = layout.layers, WIRE_DTYPE[layout.model_dtype], rows
        distinct = {_shapes_of(layer): layer for layer in self._layers}.values()
        self._starts: list[list[int]] = []
        self._views: dict[tuple[int, tuple[tuple[int, int], ...]], Views] = {}
        self._of_layer: dict[tuple[int, int], Views] = {}
        self._memory = np.zeros(0, np.uint8)
        self.num_bytes = self.largest_part = 0
        for each in rows:
            starts = []
            for most in map(max, zip(*(self._sizes(layer, each) for layer in distinct), strict=True)):
                starts.append(self.num_bytes)
                self.num_bytes += -(-most // ALIGNMENT) * ALIGNMENT
                self.largest_part = max(self.largest_part, most)
            self._starts.append(starts)
            self.largest_part = max(self.largest_part, self.num_bytes - starts[3] if each.partials else 0)

    @property
    def num_mini_batches(self) -> int:
        return len(self._rows)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def place(self, memory: np.ndarray) -> None:
        """Use ``memory``, uint8 [at least num_bytes], which is aligned to a cache line."""
        self._memory = memory
        self._views.clear()
        self._of_layer.clear()

    def views(self, mini_batch: int, layer: int) -> Views:
        """Return q, k, v, o and partial results of one layer of one mini-batch. Layers of one shape share memory."""
        found = self._of_layer.get((mini_batch, layer))
        if found is None:
            spec = self._layers[layer]
            key = (mini_batch, _shapes_of(spec))
            found = self._views.get(key) or self._make_views(mini_batch, spec)
            self._views[key] = self._of_layer[mini_batch, layer] = found
        return found

    def check(self, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """Raise ValueError unless q, k, v have the shapes and dtype of the plan."""
        for place, array in zip(self.views(mini_batch, layer), arrays, strict=False):
            if array.shape != place.shape or array.dtype != place.dtype:
                raise ValueError(
                    f"a PAYLOAD of mini-batch {mini_batch}, layer {layer} with an array of shape {array.shape}, "
                    f"{array.dtype}, and the plan has {place.shape}, {place.dtype}"
                )

    def fill(self, mini_batch: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy q, k, v to their places. Raise ValueError as ``check`` does."""
        self.check(mini_batch, layer, arrays)
        for place, array in zip(self.views(mini_batch, layer), arrays, strict=False):
            place[...] = array

    def stretch(self, mini_batch: int, layer: int) -> np.ndarray:
        """Return the bytes from the first of q to the last of v, uint8 [num_bytes], with the padding between them."""
        first, _, last, *_ = self._starts[mini_batch]
        return self._memory[first : last + self.views(mini_batch, layer)[2].nbytes]

    def answer(self, mini_batch: int, layer: int) -> np.ndarray:
        """Return the memory of the R-worker's answer: o, or the bytes from o to the last partial result."""
        views = self.views(mini_batch, layer)
        if not len(views[4]):
            return views[3]
        *_, first, last = self._starts[mini_batch]
        return self._memory[first : last + views[4].nbytes]

    def _make_views(self, mini_batch: int, layer: Layer) -> Views:
        shapes = _shapes(layer, self._rows[mini_batch])
        sizes = self._sizes(layer, self._rows[mini_batch])
        dtypes = (*(self._dtype,) * 4, np.dtype(np.float32))
        q, k, v, o, partials = (
            self._memory[start : start + size].view(dtype).reshape(shape)
            for start, size, dtype, shape in zip(self._starts[mini_batch], sizes, dtypes, shapes, strict=True)
        )
        return q, k, v, o, partials

    def _sizes(self, layer: Layer, rows: RowCounts) -> list[int]:
        item_bytes = (*(self._dtype.itemsize,) * 4, 4)
        return [
            num * heads * dim * item for (num, heads, dim), item in zip(_shapes(layer, rows), item_bytes, strict=True)
        ]


def aligned_memory(num_bytes: int) -> np.ndarray:
    """Return uninitialized uint8 [num_bytes] that begins at a cache line."""
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def row_counts(spans: np.ndarray) -> RowCounts:
    """Return the numbers of rows that one R-worker's SPAN records ``spans`` [num_spans] have in a mini-batch."""
    counts = np.bincount(spans["mode"], spans["num_rows"], len(SpanMode)).astype(np.int64)
    append, attend, partial, read = counts.tolist()
    queries, stored = attend + partial + read, append + attend + partial
    return RowCounts(queries, stored, attend, read + (_tail_rows(spans) if partial else 0), attend + partial)


def _tail_rows(spans: np.ndarray) -> int:
    """Return the number of rows of partial results that the PARTIAL spans among ``spans`` give."""
    tails = spans[spans["mode"] == SpanMode.PARTIAL]
    ends = (tails["context_len"] + tails["num_rows"]).tolist()
    return sum(rows * len(node_widths(end)) for rows, end in zip(tails["num_rows"].tolist(), ends, strict=True))


@functools.lru_cache(1024)
def _shapes_of(layer: Layer) -> tuple[tuple[int, int], ...]:
    """Return the shapes of a row of q, k, v, o and partial results."""
    return *layer.row_shapes, layer.partial_shape


def _shapes(layer: Layer, rows: RowCounts) -> list[tuple[int, int, int]]:
    rows = rows.of(layer)
    counts = (rows.queries, rows.stored, rows.stored, rows.outputs, rows.partials)
    return [(count, *shape) for count, shape in zip(counts, _shapes_of(layer), strict=True)]


def encode_plan(plan: WorkerPlan) -> bytes:
    """Return the counts of controls, mini-batches and spans per mini-batch as u64, then CONTROL and SPAN records."""
    counts = np.array([len(spans) for spans in plan.mini_batches], "<u8")
    head = _COUNTS.pack(len(plan.controls), len(counts)) + counts.tobytes()
    return b"".join([head, plan.controls.tobytes(), *(spans.tobytes() for spans in plan.mini_batches)])


def decode_plan(data: bytes | bytearray) -> WorkerPlan:
    """Return the plan. Raise FrameError for wrong lengths or too many rows; the R-worker checks the rest."""
    if len(data) < _COUNTS.size:
        raise FrameError(f"PLAN: {len(data)} bytes are too few")
    num_controls, num_mini_batches = _COUNTS.unpack_from(data)
    max_mini_batches = 1024
    if num_mini_batches > max_mini_batches or len(data) < _COUNTS.size + 8 * num_mini_batches:
        raise FrameError(f"PLAN: {num_mini_batches} mini-batches do not fit {len(data)} bytes")
    counts = np.frombuffer(data, "<u8", num_mini_batches, _COUNTS.size).tolist()
    start = _COUNTS.size + 8 * num_mini_batches
    wanted = start + num_controls * CONTROL.itemsize + sum(counts) * SPAN.itemsize
    if len(data) != wanted:
        raise FrameError(f"PLAN: {len(data)} bytes, and its counts take {wanted}")
    controls = np.frombuffer(data, CONTROL, num_controls, start)
    spans = np.frombuffer(data, SPAN, sum(counts), start + controls.nbytes)
    if len(spans) and not 0 <= spans["num_rows"].min() <= spans["num_rows"].max() <= MAX_ROWS:
        raise FrameError(f"PLAN: a span must have 0 to {MAX_ROWS:,} rows")
    if len(spans) and not 0 <= spans["mode"].min() <= spans["mode"].max() < len(SpanMode):
        raise FrameError(f"PLAN: a span's mode must be 0 to {len(SpanMode) - 1}")
    max_position = 1 << 40
    if len(spans) and not 0 <= spans["context_len"].min() <= spans["context_len"].max() <= max_position:
        raise FrameError(f"PLAN: a span must have a context of 0 to {max_position:,} tokens")
    return WorkerPlan(controls, tuple(np.split(spans, np.cumsum(counts)[:-1])) if counts else ())


def encode_report(report: WorkerReport) -> bytes:
    """Return bytes read, blocks free, and 1 if the R-worker asks to leave, then busy starts and ends as float64."""
    head = _REPORT.pack(report.bytes_read, report.blocks_free, report.leaving)
    return head + report.busy_start.astype("<f8").tobytes() + report.busy_end.astype("<f8").tobytes()


def decode_report(data: bytes | bytearray, num_mini_batches: int, num_layers: int) -> WorkerReport:
    """Return the report, with times on the R-worker's clock.

    Raise FrameError for another length, times that are not finite, or negative counts.
    """
    wanted = _REPORT.size + 16 * num_mini_batches * num_layers
    if len(data) != wanted:
        raise FrameError(f"REPORT: {len(data)} bytes, not {wanted}")
    bytes_read, blocks_free, leaving = _REPORT.unpack_from(data)
    if leaving > 1:
        raise FrameError(f"REPORT: leaving must be 0 or 1, not {leaving}")
    busy = np.frombuffer(data, "<f8", offset=_REPORT.size).reshape(2, num_mini_batches, num_layers)
    if min(bytes_read, blocks_free) < 0 or not np.isfinite(busy).all():
        raise FrameError(f"REPORT: {bytes_read} bytes read, {blocks_free} blocks free, or times that are not finite")
    return WorkerReport(busy[0].copy(), busy[1].copy(), 0.0, bytes_read, blocks_free, bool(leaving))
