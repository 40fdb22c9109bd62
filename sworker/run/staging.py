"""The rows of a mini-batch, packed for the model; and staging, which moves q, k, v to R-workers and o back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.step import MiniBatch

MIN_ROWS = 16
"""Least rows of a forward. torch's CPU matrix product gives a row the same bits only from 8 rows on."""


@dataclass(frozen=True)
class PromptRows:
    """A prompt chunk that attends on the S-worker; ``rows``: its rows among the packed ones."""

    sequence_id: int
    rows: slice
    context_len: int
    last_of_prompt: bool


class Tap(Protocol):
    """The interface of an object that keeps the queries of some rows of a mini-batch."""

    def take(self, layer: int, q: torch.Tensor) -> None:
        """Copy the wanted rows of ``q``, [rows, num_heads, query_dim], before its memory is reused."""


@dataclass(frozen=True)
class PackedRows:
    """One mini-batch, ready for the model.

    ``input_ids``, ``position_ids``: int64 [1, T], T ≥ ``least_rows``, padding last. ``logits_rows``: int64, the
    ``num_sampled`` rows that need logits, then padding (empty if no row needs them); None: all T rows get logits, and
    the first ``num_sampled`` need them. ``attending_rows``: selects, of ``num_rows`` rows, those on R-workers.
    ``tap``: keeps the queries of some rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_rows: torch.Tensor | None
    num_rows: int
    num_sampled: int
    attending_rows: slice | torch.Tensor
    prompt_rows: tuple[PromptRows, ...]
    tap: Tap | None = None

    @property
    def is_plain(self) -> bool:
        """True if no row is padding, all rows attend on R-workers, and nothing else uses the rows' q, k and v."""
        return self.tap is None and self.attending_rows == slice(0, self.input_ids.shape[1])


def pack(mini_batch: MiniBatch, device: torch.device, least_rows: int = MIN_ROWS) -> PackedRows:
    """Return the chunks of a mini-batch as packed rows, in the order in which R-workers get them.

    ``least_rows``: forwards with fewer rows are padded to this number.
    """
    chunks, tokens = mini_batch.chunks, mini_batch.token_ids
    counts = chunks["num_rows"]
    ends = np.cumsum(counts)
    if len(tokens) == len(chunks):  # each chunk has one row
        positions, wanted, attends = chunks["context_len"], chunks["scored"] | chunks["samples"], chunks["attends"]
    else:
        positions = np.arange(len(tokens)) + np.repeat(chunks["context_len"] - (ends - counts), counts)
        wanted, attends = _wanted_rows(chunks, ends), np.repeat(chunks["attends"], counts)
    sampled, attending = np.flatnonzero(wanted), _attending_rows(attends)
    padding = np.zeros(max(0, least_rows - len(tokens)), np.int64)
    kept = np.concatenate([sampled, np.repeat(sampled[-1:], max(0, least_rows - len(sampled)))])
    num_padded = len(tokens) + len(padding)
    keeps_all = len(kept) == num_padded and bool(sampled[-1] == len(sampled) - 1)
    parts = [tokens, padding, positions, padding, kept, attending if isinstance(attending, np.ndarray) else padding[:0]]
    on_device = to_device(np.concatenate(parts), device)
    both, logits_rows, attending_rows = on_device.split([2 * num_padded, len(kept), len(parts[-1])])
    input_ids, position_ids = both.view(2, 1, num_padded)
    return PackedRows(
        input_ids=input_ids,
        position_ids=position_ids,
        logits_rows=None if keeps_all else logits_rows,
        num_rows=len(tokens),
        num_sampled=len(sampled),
        attending_rows=attending if isinstance(attending, slice) else attending_rows,
        prompt_rows=() if attends.all() else _prompt_rows(chunks, ends),
    )


def _prompt_rows(chunks: np.ndarray, ends: np.ndarray) -> tuple[PromptRows, ...]:
    """Return the chunks that attend on the S-worker. ``ends``: int64, for each chunk, the end of its rows."""
    here = ~chunks["attends"]
    return tuple(
        PromptRows(
            int(chunk["sequence_id"]),
            slice(int(end - chunk["num_rows"]), int(end)),
            int(chunk["context_len"]),
            bool(chunk["last_of_prompt"]),
        )
        for chunk, end in zip(chunks[here], ends[here], strict=True)
    )


def to_device(numbers: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Return int64 [len(numbers)] on ``device``, by one asynchronous copy."""
    on_host = torch.as_tensor(numbers, dtype=torch.int64)
    if device.type == "cpu":
        return on_host
    # torch keeps the pinned tensor's memory until its copy has ended
    return on_host.pin_memory().to(device, non_blocking=True)


def _wanted_rows(chunks: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return bool [num_rows], True if a row needs logits: the last of a sampling chunk, and all of a scored chunk."""
    wanted: np.ndarray = np.repeat(chunks["scored"], chunks["num_rows"])
    wanted[ends[chunks["samples"]] - 1] = True
    return wanted


def _attending_rows(attends: np.ndarray) -> slice | np.ndarray:
    """Return the rows for which ``attends`` is true: as a slice if they come first, else as indices."""
    count = int(attends.sum())
    return slice(0, count) if attends[:count].all() else np.flatnonzero(attends)


TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def rows_of(heads: torch.Tensor) -> torch.Tensor:
    """Return a view [T, heads, dim] of [1, heads, T, dim]. In most models it is already contiguous."""
    return heads[0].transpose(0, 1)


def to_numpy(rows: torch.Tensor) -> np.ndarray:
    """Return ``rows`` as a C-contiguous array, sharing memory if possible; 16-bit floats as uint16."""
    rows = rows.contiguous()
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of ``dtype`` over the array's memory; the inverse of :func:`to_numpy`."""
    tensor = torch.from_numpy(array)
    return tensor if dtype == torch.float32 else tensor.view(dtype)


class Staging(Protocol):
    """Moves tensors between an S-worker and its attention backend. The pipeline's thread calls it."""

    def begin_step(self) -> None:
        """Drop transfers that an abandoned step has left unfinished."""

    def send(self, mini_batch: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Start sending q [attending rows, num_heads, dim], k and v [rows, num_kv_heads, …], of any strides."""

    def next_ready(self, mini_batches: Sequence[int]) -> int:
        """Return the first of ``mini_batches`` whose o can be collected, else one for whose o ``collect`` waits.

        R-workers compute for all of ``mini_batches``.
        """

    def collect(self, mini_batch: int) -> torch.Tensor | np.ndarray:
        """Return o, [attending rows, num_heads, value_head_dim], which stays valid until ``send``.

        A tensor on a GPU; on a CPU the backend's array, whose dtype may be an integer dtype with the same bits.
        """

    def mark(self) -> None:
        """Mark, on the device's clock if it has one, that model code begins or ends here."""

    def device_seconds(self) -> float | None:
        """Return the sum of times between marked begins and ends in this step; None if the device has no own clock."""


class HostStaging:
    """Staging of a model on the CPU. The backend gets q, k, v with at most one copy, and starts at once."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def begin_step(self) -> None:
        """Do nothing."""

    def send(self, mini_batch: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._backend.submit(mini_batch, layer, to_numpy(q), to_numpy(k), to_numpy(v))

    def send_arrays(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Start sending q, k and v in the form of ``to_numpy``. The arrays must not change until ``collect``."""
        self._backend.submit(mini_batch, layer, q, k, v)

    def next_ready(self, mini_batches: Sequence[int]) -> int:
        """See ``Staging.next_ready``. Only ``collect`` waits."""
        if len(mini_batches) == 1:
            return mini_batches[0]
        return next(filter(self._backend.ready, mini_batches), mini_batches[0])

    def collect(self, mini_batch: int) -> np.ndarray:
        """See ``Staging.collect``. The result is the backend's memory."""
        return self._backend.collect(mini_batch)

    def mark(self) -> None:
        """Do nothing."""

    def device_seconds(self) -> float | None:
        return None


class QueryTap:
    """Keeps the queries of some rows of one mini-batch, layer by layer, on the model's device."""

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        """``rows``: int64 [num_rows], indices into all rows of the mini-batch."""
        self._places = {row: place for place, row in enumerate(rows.tolist())}
        self._rows = to_device(rows, device)
        self._queries: dict[int, torch.Tensor | np.ndarray] = {}

    def take(self, layer: int, q: torch.Tensor) -> None:
        """Keep the chosen rows' queries in ``layer``. ``q``: [rows, num_heads, query_dim] of the whole mini-batch."""
        self._queries[layer] = q.index_select(0, self._rows)

    def of(self, row: int, layer: int) -> np.ndarray:
        """Return the queries of row ``row`` of the mini-batch in ``layer``, [1, num_heads, query_dim]."""
        found = self._queries[layer]
        if isinstance(found, torch.Tensor):
            self._queries[layer] = found = to_numpy(found.cpu())
        place = self._places[row]
        return found[place : place + 1]


class QueryTaps:
    """The queries that are kept in one step, by mini-batch. Implements ``Queries`` for these rows."""

    def __init__(self, rows: Sequence[np.ndarray], device: torch.device) -> None:
        """``rows``: for each mini-batch, the indices of rows whose queries are kept; empty if the step keeps none."""
        self._taps = {index: QueryTap(each, device) for index, each in enumerate(rows) if len(each)}

    def __getitem__(self, mini_batch: int) -> QueryTap | None:
        """Return what keeps the queries of mini-batch ``mini_batch``; None if none of its queries are kept."""
        return self._taps.get(mini_batch)

    def of(self, mini_batch: int, row: int, layer: int) -> np.ndarray:
        return self._taps[mini_batch].of(row, layer)
