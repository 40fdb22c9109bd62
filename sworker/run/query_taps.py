"""Keeps queries of some rows during a step, to ask afterwards how these rows' attention is shared among blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fastdecode.sworker.run.staging import to_device, to_numpy


class QueryTap:
    """Keeps the queries of some rows of one mini-batch, layer by layer, on the model's device."""

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        """``rows``: int64 [num_rows], indices into all rows of the mini-batch."""
        self._places = {row: place for place, row in enumerate(rows.tolist())}
        self._rows = to_device(rows, device)
        self._queries: dict[int, torch.Tensor | np.ndarray] = {}

    def take(self, layer: int, q: torch.Tensor) -> None:
        """Keep the tapped rows' queries in ``layer``. ``q``: [rows, num_heads, query_dim] of the whole mini-batch."""
        self._queries[layer] = q.index_select(0, self._rows)

    def of(self, row: int, layer: int) -> np.ndarray:
        """Return the queries of row ``row`` in ``layer``, [1, num_heads, query_dim]."""
        found = self._queries[layer]
        if isinstance(found, torch.Tensor):
            self._queries[layer] = found = to_numpy(found.cpu())
        place = self._places[row]
        return found[place : place + 1]


class QueryTaps:
    """The query taps of one step, by mini-batch. Implements ``Queries`` for the tapped rows."""

    def __init__(self, rows: Sequence[np.ndarray], device: torch.device) -> None:
        """``rows``: for each mini-batch, the indices of its tapped rows; empty if the step taps nothing."""
        self._taps = {index: QueryTap(each, device) for index, each in enumerate(rows) if len(each)}

    def __getitem__(self, mini_batch: int) -> QueryTap | None:
        """Return the tap of mini-batch ``mini_batch``; None if none of its rows is tapped."""
        return self._taps.get(mini_batch)

    def of(self, mini_batch: int, row: int, layer: int) -> np.ndarray:
        """See ``Queries``."""
        return self._taps[mini_batch].of(row, layer)
