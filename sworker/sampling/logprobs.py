"""Log-probabilities reported beside sampled tokens: of the model's own logits, before any option changed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdecode.sworker.sampling.ranking import ranking_keys, top_token_ids

Logprobs = dict[int, tuple[float, int]]
"""Token id to (log-probability, rank from 1)."""


def raw_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """The chosen token's log-probability and the ``counts[row]`` likeliest (-1: all), one dict per row.

    ``logits``: floating [num_rows, vocab] without NaN or +inf; ``token_ids``: the chosen ones. Equal log-probabilities
    rank by token id, so ranks are unique and the dict is the same in every batch.
    """
    logprobs = logits.to(torch.float32).log_softmax(-1)
    vocab = logprobs.shape[1]
    keys = ranking_keys(logprobs, low_ids_first=True)
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    ranks = (keys > keys.gather(1, chosen)).sum(-1) + 1
    wanted = [vocab if count < 0 else min(count, vocab) for count in counts]
    ids = torch.cat([chosen, top_token_ids(keys, max(wanted), low_ids_first=True)], dim=1)
    values = logprobs.gather(1, ids)
    listed = zip(ids.tolist(), values.tolist(), ranks.tolist(), wanted, strict=True)
    return [_row_logprobs(row_ids, row_values, rank, count) for row_ids, row_values, rank, count in listed]


def _row_logprobs(ids: list[int], values: list[float], chosen_rank: int, count: int) -> Logprobs:
    """``ids`` and ``values`` start with the chosen token, followed by the likeliest in order."""
    chosen = {ids[0]: (values[0], chosen_rank)}
    likeliest = {ids[rank]: (values[rank], rank) for rank in range(1, count + 1)}
    return chosen | likeliest
