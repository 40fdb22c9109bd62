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
    sampled = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
    padding = [0] * (MIN_ROWS - len(tokens))
    kept = sampled + sampled[-1:] * (MIN_ROWS - len(sampled))
    return PackedRows(
        input_ids=torch.tensor([tokens + padding], device=device),
        position_ids=torch.tensor([positions + padding], device=device),
        logits_rows=torch.tensor(kept, dtype=torch.int64, device=device),
        num_rows=len(tokens),
        num_sampled=len(sampled),
        attending_rows=_attending_rows(chunks, ends, device),
        prompt_rows=tuple(
            PromptRows(
                chunk.sequence_id, slice(end - len(chunk.token_ids), end), chunk.context_len, chunk.last_of_prompt
            )
            for chunk, end in zip(chunks, ends, strict=True)
            if not chunk.attends
        ),
    )


def _attending_rows(chunks: Sequence[Chunk], ends: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice where the attending rows lead (always so with one R-worker), else their indices."""
    rows = [
        row
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.attends
        for row in range(end - len(chunk.token_ids), end)
    ]
    if not rows or rows[-1] == len(rows) - 1:
        return slice(0, len(rows))
    return torch.tensor(rows, device=device)
