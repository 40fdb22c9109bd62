"""Packing a mini-batch's chunks into one row of tokens, as the unmodified model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fastdecode.types import Chunk

MIN_ROWS = 16
"""Smaller forwards are padded: torch's CPU matrix product gives a row the same bits only from 8 rows on."""


@dataclass(frozen=True)
class PromptRows:
    """Where a prompt chunk that attends on the S-worker lies in the packed rows."""

    sequence_id: int
    rows: slice
    context_len: int
    last_of_prompt: bool


@dataclass(frozen=True)
class PackedRows:
    """One mini-batch, ready for the model.

    ``input_ids``, ``position_ids``: int64 [1, T], T ≥ MIN_ROWS, padding last. ``logits_rows``: int64, the rows whose
    logits are wanted, padded to MIN_ROWS unless empty; the first ``num_sampled`` count. ``attending_rows`` selects
    the rows that attend on an R-worker among the first ``num_rows``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_rows: torch.Tensor
    num_rows: int
    num_sampled: int
    attending_rows: slice | torch.Tensor
    prompt_rows: tuple[PromptRows, ...]


def pack(chunks: Sequence[Chunk], device: torch.device) -> PackedRows:
    """Lay ``chunks`` one after the other; their order is the order of the rows at the seam."""
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    positions = [chunk.context_len + i for chunk in chunks for i in range(len(chunk.token_ids))]
    ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
    sampled = [row for chunk, end in zip(chunks, ends, strict=True) for row in _logits_rows(chunk, end)]
    padding = [0] * (MIN_ROWS - len(tokens))
    kept = sampled + sampled[-1:] * (MIN_ROWS - len(sampled))
    attending = _attending_rows(chunks, ends)
    parts = (tokens + padding, positions + padding, kept, attending if isinstance(attending, list) else [])
    on_device = to_device([number for part in parts for number in part], device)
    input_ids, position_ids, logits_rows, attending_rows = on_device.split([len(part) for part in parts])
    return PackedRows(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        logits_rows=logits_rows,
        num_rows=len(tokens),
        num_sampled=len(sampled),
        attending_rows=attending if isinstance(attending, slice) else attending_rows,
        prompt_rows=tuple(
            PromptRows(
                chunk.sequence_id, slice(end - len(chunk.token_ids), end), chunk.context_len, chunk.last_of_prompt
            )
            for chunk, end in zip(chunks, ends, strict=True)
            if not chunk.attends
        ),
    )


def _logits_rows(chunk: Chunk, end: int) -> range:
    """The rows whose logits are wanted, of a chunk that ends before row ``end``."""
    count = len(chunk.token_ids) if chunk.scored else int(chunk.samples)
    return range(end - count, end)


def to_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [len(numbers)] on ``device``, in one copy that nobody waits for."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    # torch keeps the pinned memory until its copy has ended, though nobody else holds it.
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _attending_rows(chunks: Sequence[Chunk], ends: list[int]) -> slice | list[int]:
    """A slice where the attending rows lead (always so with one R-worker), else their indices."""
    rows = [
        row
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.attends
        for row in range(end - len(chunk.token_ids), end)
    ]
    if not rows or rows[-1] == len(rows) - 1:
        return slice(0, len(rows))
    return rows
