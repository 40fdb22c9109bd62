"""A total order of a row's tokens: one integer key per token, so that top-k is the same in every batch, ties too."""

from __future__ import annotations

import torch
from torch import Tensor

_ID_MASK = 2**32 - 1


def ranking_keys(scores: Tensor, *, low_ids_first: bool) -> Tensor:
    """Keys that sort like the scores, equal scores by token id; no two are equal.

    ``scores``: float32 [num_rows, vocab] without NaN. Returns int64 of the same shape: the score's bits, reordered to
    compare as integers, above 32 bits of token id.
    """
    bits = (scores + 0.0).view(torch.int32)  # adding 0.0 makes -0.0 equal 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered << 32) | (_ID_MASK - ids if low_ids_first else ids)


def top_token_ids(keys: Tensor, count: int, *, low_ids_first: bool) -> Tensor:
    """The ``count`` highest-ranked token ids of each row in order, int64 [num_rows, count]."""
    ids = keys.topk(count, dim=-1).values & _ID_MASK
    return _ID_MASK - ids if low_ids_first else ids
