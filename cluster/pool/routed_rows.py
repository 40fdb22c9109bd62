"""The rows of one mini-batch during a step.

Each R-worker gets its part of q, k, v; o is filled and merged; transfer times are measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fastdecode import _rworker
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.routes import is_empty
from fastdecode.core.types import Merge, MiniBatchRoutes, Route, Rows
from fastdecode.kinds import Layer
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.layout import KVLayout

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
"""q, k, v, o and partial results, as in ``PoolWorker.submit``."""


class _Share(NamedTuple):
    """One R-worker's rows of q, k and v in layers of one shape, and the memory for its o and partial results.

    ``in_place``: the R-worker's rows are consecutive in the mini-batch, so none is copied.
    """

    worker: int
    in_place: bool
    q_rows: Rows
    kv_rows: Rows
    o: np.ndarray
    partials: np.ndarray | None


class Form(NamedTuple):
    """The form of a layer's results: the kind of its routes, and the shapes of a row of o and of partial results."""

    caches_rows: bool
    o: tuple[int, int]
    partials: tuple[int, int]


class RoutedRows:
    """One mini-batch in a step: splits q, k, v by R-worker, layer by layer, and assembles o.

    ``layer``: the last layer scattered, None before the first. ``busy``: the R-workers with rows in that layer. Layers
    of one kind and shape share their arrays.
    """

    def __init__(self, layout: KVLayout, forms: Sequence[Form], routes: MiniBatchRoutes) -> None:
        """``forms``: the forms of the layout's layers."""
        self.layer: int | None = None
        self._layout, self._forms, self._routes = layout, forms, routes
        self.busy = _busy(routes.workers)
        self._of_kind: dict[bool, tuple[Sequence[Route], list[int]]] = {True: (routes.workers, self.busy)}
        self._set_merge(routes.merge)
        self._zeroed: list[slice] = []
        self._shares: dict[Form, tuple[np.ndarray, list[_Share]]] = {}
        self._form: Form | None = None
        self._spec: Layer | None = None
        self._taken: dict[tuple[str, int, tuple[int, ...]], np.ndarray] = {}
        self._o = np.zeros((0, 0, 0), WIRE_DTYPE[layout.model_dtype])

    def scatter(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Iterator[tuple[int, Arrays]]:
        """Yield (R-worker index, its rows of q, k, v, o and partial results) for each busy R-worker.

        q, k, v are as in ``AttentionBackend.submit``.
        """
        self.layer, self._spec, form = layer, self._layout.layers[layer], self._forms[layer]
        if form is not self._form:  # mostly all layers have the same form
            self._form, self.busy = form, self._routes_of(form.caches_rows)[1]
            if form not in self._shares:
                self._shares[form] = self._make_shares(len(q), form)
            self._o = self._shares[form][0]
        for worker, in_place, q_rows, kv_rows, o, partials in self._shares[form][1]:
            if in_place:
                yield worker, (q[q_rows], k[kv_rows], v[kv_rows], o, partials)
            else:
                own_q, own_k = self._take("q", worker, q, q_rows), self._take("k", worker, k, kv_rows)
                yield worker, (own_q, own_k, self._take("v", worker, v, kv_rows), o, partials)

    def gather(self, isa: str) -> np.ndarray:
        """Return the scattered layer's o, valid until the next ``scatter``; call this once all R-workers have answered.

        Partial results are merged in the arithmetic of ``isa``. An index layer has nothing to merge: call ``picks``.
        """
        for rows in self._zeroed:
            self._o[rows] = 0
        if self._tables and isinstance(self._spec, Attending):
            _rworker.merge_partials(
                self._partials(self._spec), *self._tables, self._spec.sinks, self._o, self._layout.model_dtype, isa
            )
        return self._o

    def picks(self) -> Iterator[tuple[int, np.ndarray]]:
        """After ``gather`` of an index layer, yield (index, counts) of each R-worker with partial results.

        An index layer picks each query's best tokens on all R-workers together. A count says how many of them are on
        this R-worker: int32 [rows of partial results, heads that pick]. Among equal scores, earlier tokens win.
        """
        if not (self._spec and self._spec.ranks_tokens):
            return
        none = np.zeros((0, 5), np.int64), np.zeros((0, 4), np.int64)
        partials = self._partials(self._spec)
        if any(map(len, partials)):
            for worker, counts in enumerate(_rworker.share_picks(partials, *(self._tables or none))):
                if len(counts):
                    yield worker, counts

    def lose(self, worker: int) -> None:
        """Set rows of o to zero from now on if the lost R-worker ``worker`` computes any part of them."""
        gone = self._merge.with_part_of(worker)
        merged = self._merge.merged[gone]
        ends = merged["row"] + merged["num_rows"]
        self._zeroed.append(self._routes.workers[worker].o_rows)
        self._zeroed += map(slice, merged["row"].tolist(), ends.tolist())
        self._set_merge(self._merge.take(~gone))

    def _set_merge(self, merge: Merge) -> None:
        self._merge = merge
        self._tables = (_as_table(merge.parts), _as_table(merge.merged)) if len(merge.merged) else None

    def _make_shares(self, num_rows: int, form: Form) -> tuple[np.ndarray, list[_Share]]:
        """Return the output array o, and each involved R-worker's share of the rows, for layers of ``form``."""
        o, shares = np.empty((num_rows, *form.o), self._o.dtype), []
        routes, busy = self._routes_of(form.caches_rows)
        for worker in busy:
            route = routes[worker]
            partials = np.empty((route.num_partials, *form.partials), np.float32) if route.num_partials else None
            in_place = isinstance(route.q_rows, slice) and isinstance(route.kv_rows, slice)
            shares.append(_Share(worker, in_place, route.q_rows, route.kv_rows, o[route.o_rows], partials))
        return o, shares

    def _routes_of(self, caches_rows: bool) -> tuple[Sequence[Route], list[int]]:
        """Return the routes of one kind of layers, and the R-workers with rows: attending layers, or recurrent ones."""
        if caches_rows not in self._of_kind:
            recurrent = self._routes.recurrent
            routes = recurrent() if recurrent else self._routes.workers
            self._of_kind[caches_rows] = routes, _busy(routes)
        return self._of_kind[caches_rows]

    def _take(self, name: str, worker: int, array: np.ndarray, rows: Rows) -> np.ndarray:
        """Return the rows ``rows`` of ``array``: a view if they are consecutive, else a copy in reused memory."""
        if isinstance(rows, slice):
            return array[rows]
        shape = len(rows), *array.shape[1:]
        if (key := (name, worker, shape)) not in self._taken:
            self._taken[key] = np.empty(shape, array.dtype)
        return np.take(array, rows, axis=0, out=self._taken[key], mode="clip")  # another mode would copy ``out``

    def partials_of(self, worker: int) -> np.ndarray:
        """Return R-worker ``worker``'s partial results in the scattered layer: float32 [rows, ...]."""
        if self._spec is None:
            raise ValueError("no layer was scattered: call scatter first")
        return self._partials(self._spec)[worker]

    def _partials(self, spec: Layer) -> list[np.ndarray]:
        """Return each busy R-worker's partial results in the scattered layer, whose description is ``spec``."""
        form = form_of(spec)
        found = [np.zeros((0, *form.partials), np.float32)] * len(self._routes.workers)
        for share in self._shares[form][1]:
            if share.partials is not None:
                found[share.worker] = share.partials
        return found


def _as_table(records: np.ndarray) -> np.ndarray:
    """Return records of int64 fields as int64 [num_records, num_fields]."""
    return records.view(np.int64).reshape(len(records), records.dtype.itemsize // 8)


def transfer_seconds(
    submitted: np.ndarray, busy_start: np.ndarray, busy_end: np.ndarray, arrived: np.ndarray | None = None
) -> float:
    """Return the seconds for which data travelled to and from an R-worker, without time in the R-worker's queue.

    A call (one layer of one mini-batch) counts from its submission, or from the previous call's end if that is later,
    to its busy start; and from its busy end to the arrival of o. Arrays are float64 [num_mini_batches, num_layers] on
    one clock, and 0 where nothing ran. ``arrived``: when o arrived if the S-worker was waiting for it, else 0, since
    then the transfer of o delayed nothing.
    """
    back = np.zeros_like(submitted) if arrived is None else arrived
    # A step has so few calls that lists are some ten times as fast as numpy
    calls = zip(*(each.ravel().tolist() for each in (busy_start, busy_end, submitted, back)), strict=True)
    seconds = queue_end = 0.0
    for start, end, asked, seen in sorted(call for call in calls if call[1] > 0):
        seconds += max(start - max(asked, queue_end), 0.0) + (max(seen - end, 0.0) if seen else 0.0)
        queue_end = end
    return seconds


def _busy(routes: Sequence[Route]) -> list[int]:
    """Return the R-workers that get rows by ``routes``."""
    return [worker for worker, route in enumerate(routes) if not is_empty(route)]


@functools.lru_cache(1024)
def form_of(layer: Layer) -> Form:
    """Return the form of the results of ``layer``."""
    return Form(layer.caches_rows, layer.row_shapes[3], layer.partial_shape)
