"""Splits a mini-batch among R-workers: which spans and which rows each of them gets, computed once per plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fastdecode.core.errors import BackendError
from fastdecode.core.types import (
    MERGED,
    NO_MERGE,
    PART,
    SPAN,
    SPLIT_TOKENS,
    Merge,
    MiniBatchRoutes,
    Route,
    Rows,
    SpanMode,
    WorkerPlan,
)


def plan_mini_batch(
    chunks: np.ndarray, reads: np.ndarray, num_workers: int
) -> tuple[tuple[np.ndarray, ...], MiniBatchRoutes]:
    """Return each R-worker's SPAN records of a mini-batch, and the routes of the mini-batch's rows.
    ``chunks`` and ``reads``: CHUNK and READ records in the order of a ``MiniBatch``.
    """
    bounds = np.searchsorted(chunks["worker"], np.arange(num_workers + 1))
    own = _own_spans(chunks)
    spans = _pieces(own, bounds)
    has_tails, merge = bool(chunks["base"].any()), NO_MERGE
    routes = _own_routes(chunks, bounds, has_tails)
    if has_tails:
        merge, num_partials = _merge(chunks, reads, num_workers)
        closed = _reads_by_worker(chunks, reads, num_workers)
        spans = [np.concatenate(both) for both in zip(closed.spans, spans, strict=True)]
        routes = [
            Route(_joined(rows, route.q_rows), route.kv_rows, route.o_rows, num_partials[worker])
            for worker, (rows, route) in enumerate(zip(closed.rows, routes, strict=True))
        ]
    copied = None
    if (chunks["copy"] >= 0).any():
        copied = _appends_by_worker(chunks, own, num_workers)
        spans = [np.concatenate(both) for both in zip(spans, copied.spans, strict=True)]
        routes = _with_copies(routes, copied)
    recurrent = partial(_recurrent_routes, chunks, bounds, copied) if has_tails else None
    return tuple(spans), MiniBatchRoutes(tuple(routes), merge, recurrent)


def routes_of_spans(workers: Sequence[WorkerPlan]) -> tuple[MiniBatchRoutes, ...]:
    """Return the routes of every mini-batch, where rows are in the order of the R-workers' spans.
    Raise BackendError for READ and PARTIAL spans: they do not say which chunk their rows belong to.
    """
    routes = []
    for spans in zip(*(each.mini_batches for each in workers), strict=True):
        if any((each["mode"] > SpanMode.ATTEND).any() for each in spans):
            raise BackendError("a plan with READ or PARTIAL spans must say which rows each R-worker gets (routes)")
        kv = np.cumsum([0, *(each["num_rows"].sum() for each in spans)]).tolist()
        o = np.cumsum([0, *((each["num_rows"] * each["mode"]).sum() for each in spans)]).tolist()
        routes.append(MiniBatchRoutes(tuple(_own_route(*each) for each in zip(pairwise(o), pairwise(kv), strict=True))))
    return tuple(routes)


def read_ends(chunks: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """Return, for each READ record, the position after the last token of its segment: int64 [num_reads]."""
    owners, ends = reads["chunk"], chunks["base"][reads["chunk"]]
    follows = np.flatnonzero(owners[:-1] == owners[1:])
    ends[follows] = reads["start"][follows + 1]
    return ends


def node_widths(num_tokens: int) -> list[int]:
    """Return the widths, in splits, of the nodes of the merge tree over ``num_tokens`` tokens, widest first.
    Neighboring splits merge into nodes whose widths are powers of two: 7 splits make nodes of 4, 2 and 1.
    """
    num_splits = -(-num_tokens // SPLIT_TOKENS)
    return [1 << bit for bit in reversed(range(num_splits.bit_length())) if num_splits >> bit & 1]


class _ByWorker(NamedTuple):
    """For each R-worker, its READ spans or its spans of second copies, and their row numbers, int64 [num_rows]."""

    spans: list[np.ndarray]
    rows: list[np.ndarray]


def _own_spans(chunks: np.ndarray) -> np.ndarray:
    """Return the span of each chunk on the R-worker that stores it: SPAN [num_chunks]."""
    spans = np.empty(len(chunks), dtype=SPAN)
    spans["sequence_id"], spans["num_rows"] = chunks["cache_id"], chunks["num_rows"]
    spans["context_len"] = chunks["context_len"] - chunks["base"]
    spans["mode"] = chunks["attends"] * (1 + (chunks["base"] > 0))  # 0, 1 or 2: SpanMode's APPEND, ATTEND or PARTIAL
    return spans


def _own_routes(chunks: np.ndarray, bounds: np.ndarray, has_tails: bool) -> list[Route]:
    """Return, for each R-worker, the route of the rows that are appended there. These rows are consecutive.
    ``bounds``: int64 [num_workers + 1], where each R-worker's chunks begin. ``has_tails``: True if some chunk belongs
    to a sequence with several segments.
    """
    counts, attends = chunks["num_rows"], chunks["attends"]
    q = kv = list(pairwise(_totals(counts)[bounds].tolist()))
    if not attends.all():
        q = list(pairwise(_totals(counts * attends)[bounds].tolist()))
    if not has_tails:
        return [_own_route(*each) for each in zip(q, kv, strict=True)]
    num_outputs = np.diff(_totals(counts * (attends & (chunks["base"] == 0)))[bounds]).tolist()
    return [
        Route(slice(*q_rows), slice(*kv_rows), slice(q_rows[0], q_rows[0] + count))
        for q_rows, kv_rows, count in zip(q, kv, num_outputs, strict=True)
    ]


def _with_copies(routes: list[Route], copied: _ByWorker) -> list[Route]:
    """Return ``routes``, extended by the rows of k and v that each R-worker stores for its second copies."""
    return [
        Route(route.q_rows, _joined(route.kv_rows, rows), route.o_rows, route.num_partials)
        for rows, route in zip(copied.rows, routes, strict=True)
    ]


def _recurrent_routes(chunks: np.ndarray, bounds: np.ndarray, copied: _ByWorker | None) -> list[Route]:
    """Return the routes in recurrent layers. They have no rows for READ spans, and rows of o for PARTIAL spans."""
    routes = _own_routes(chunks, bounds, has_tails=False)
    return _with_copies(routes, copied) if copied else routes


def _own_route(q_rows: tuple[int, int], kv_rows: tuple[int, int]) -> Route:
    attending = slice(*q_rows)
    return Route(attending, slice(*kv_rows), attending)


def _reads_by_worker(chunks: np.ndarray, reads: np.ndarray, num_workers: int) -> _ByWorker:
    """Return, for each R-worker, the READ spans of the full segments there, and the rows of q that attend to these."""
    counts = chunks["num_rows"]
    firsts = _totals(counts * chunks["attends"])[:-1]
    owners = chunks.take(reads["chunk"])
    spans = np.empty(len(reads), dtype=SPAN)
    spans["sequence_id"], spans["num_rows"] = reads["range_id"], owners["num_rows"]
    spans["context_len"], spans["mode"] = owners["context_len"] - reads["start"], SpanMode.READ
    return _by_worker(reads["worker"], spans, firsts[reads["chunk"]], num_workers)


def _appends_by_worker(chunks: np.ndarray, own: np.ndarray, num_workers: int) -> _ByWorker:
    """Return, for each R-worker, the APPEND spans of its second copies, and the rows of k and v that they store.
    ``own``: the spans of ``chunks`` on their first R-worker.
    """
    copied = np.flatnonzero(chunks["copy"] >= 0)
    spans, firsts = own.take(copied), _totals(chunks["num_rows"])[copied]
    spans["mode"] = SpanMode.APPEND
    return _by_worker(chunks["copy"][copied], spans, firsts, num_workers)


def _by_worker(workers: np.ndarray, spans: np.ndarray, firsts: np.ndarray, num_workers: int) -> _ByWorker:
    """Return ``spans`` and their row numbers, grouped by R-worker. ``workers``: the R-worker of each span.
    ``firsts``: the first row of each span.
    """
    order = np.argsort(workers, kind="stable")
    spans, counts = spans.take(order), spans["num_rows"][order]
    ends = _totals(counts)
    rows = np.repeat(firsts[order] - ends[:-1], counts) + np.arange(ends[-1])
    bounds = np.searchsorted(workers[order], np.arange(num_workers + 1))
    return _ByWorker(_pieces(spans, bounds), _pieces(rows, ends[bounds]))


def _merge(chunks: np.ndarray, reads: np.ndarray, num_workers: int) -> tuple[Merge, list[int]]:
    """Return how to merge the rows of sequences in several segments, and each R-worker's number of partial results.
    An R-worker's partial results begin with those of READ spans; those of PARTIAL spans follow.
    """
    num_rows = chunks["num_rows"]
    firsts = _totals(num_rows * chunks["attends"])
    read_rows = np.bincount(reads["worker"], num_rows[reads["chunk"]], num_workers)
    next_read, next_tail = [0] * num_workers, read_rows.astype(np.int64).tolist()
    closed: dict[int, list[tuple[int, int, int]]] = {}
    for (owner, worker, _, start), end in zip(reads.tolist(), read_ends(chunks, reads).tolist(), strict=True):
        closed.setdefault(owner, []).append((worker, start, end))
    merged: list[tuple[int, ...]] = []
    parts: list[tuple[int, ...]] = []
    for tail in np.flatnonzero(chunks["attends"] & (chunks["base"] > 0)).tolist():
        first_part, count = len(parts), int(num_rows[tail])
        for worker, start, end in closed.get(tail, ()):
            parts.append((worker, next_read[worker], 1, start // SPLIT_TOKENS, (end - start) // SPLIT_TOKENS))
            next_read[worker] += count
        worker, base, context_len = (int(chunks[name][tail]) for name in ("worker", "base", "context_len"))
        split, widths = base // SPLIT_TOKENS, node_widths(context_len + count - base)
        for node, width in enumerate(widths):
            parts.append((worker, next_tail[worker] + node, len(widths), split, width))
            split += width
        next_tail[worker] += count * len(widths)
        merged.append((int(firsts[tail]), count, first_part, len(parts) - first_part))
    return Merge(np.array(merged, MERGED), np.array(parts, PART)), next_tail


def is_empty(route: Route) -> bool:
    """Return whether the R-worker of ``route`` gets no rows."""
    return not (count_rows(route.q_rows) or count_rows(route.kv_rows))


def count_rows(rows: Rows) -> int:
    """Return the number of row indices in ``rows``."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _joined(first: Rows, second: Rows) -> Rows:
    """Return the rows of ``first``, then the rows of ``second``; a slice if they are consecutive."""
    both = (np.arange(each.start, each.stop) if isinstance(each, slice) else each for each in (first, second))
    rows = np.concatenate(list(both))
    if not len(rows):
        return slice(0, 0)
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _totals(counts: np.ndarray) -> np.ndarray:
    """Return the sums of ``counts`` before each entry, then the sum of all: int64 [len(counts) + 1]."""
    totals = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=totals[1:])
    return totals


def _pieces(values: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
    return [values[first:last] for first, last in pairwise(bounds.tolist())]
