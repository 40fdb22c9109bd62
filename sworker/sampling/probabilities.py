"""Filters that shape the distribution a token is drawn from: temperature, then min-p, top-k and top-p, as in vLLM.

Definitions are those of transformers' warpers. A stage touches only the rows that ask for it, and each row's result is
the same bit for bit whatever other rows are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastdecode.sampling_params import SamplingParams
from fastdecode.sworker.sampling.draw import WEIGHT_BITS, integer_weights
from fastdecode.sworker.sampling.ranking import ranking_keys, top_token_ids

FIRST_NUCLEUS = 256
"""Tokens ranked at first for top-p; most nuclei are smaller, and ranking all of a large vocabulary costs 30 x more."""


def probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Final probabilities of the rows that draw at random: float32 [num_rows, vocab].

    ``scores``: float32 [num_rows, vocab], contiguous, overwritten. A row with NaN or +inf, or without any finite score,
    gets meaningless values and leaves the other rows alone.
    """
    scores.div_(_column([p.temperature for p in params], scores))
    vocab = scores.shape[1]
    _filter(scores, {i: p.min_p for i, p in enumerate(params) if p.min_p > 0.0}, _min_p)
    _filter(scores, {i: float(p.top_k) for i, p in enumerate(params) if 0 < p.top_k < vocab}, _top_k)
    _filter(scores, {i: p.top_p for i, p in enumerate(params) if p.top_p < 1.0}, _top_p)
    return scores.softmax(-1)


def _filter(scores: Tensor, values: dict[int, float], dropped: Callable[[Tensor, list[float]], Tensor]) -> None:
    """Set to -inf, in the rows listed in ``values``, the tokens for which ``dropped`` says so."""
    if not values:
        return
    if len(values) == scores.shape[0]:
        scores.masked_fill_(dropped(scores, list(values.values())), -math.inf)
        return
    index = torch.tensor(list(values), device=scores.device)
    part = scores.index_select(0, index)
    scores.index_copy_(0, index, part.masked_fill_(dropped(part, list(values.values())), -math.inf))


def _min_p(scores: Tensor, min_p: list[float]) -> Tensor:
    probs = scores.softmax(-1)
    return probs < probs.amax(-1, keepdim=True) * _column(min_p, scores)


def _top_k(scores: Tensor, top_k: list[float]) -> Tensor:
    """Tokens below the k-th best score: ties with it stay, so the choice does not depend on a sort."""
    best = scores.topk(int(max(top_k)), dim=-1).values
    last_kept = torch.tensor([int(k) - 1 for k in top_k], device=scores.device)
    return scores < best.gather(1, last_kept[:, None])


def _top_p(scores: Tensor, top_p: list[float]) -> Tensor:
    """Tokens whose probability, summed from the least likely up to and with themselves, is at most 1 - p."""
    weights = integer_weights(scores.softmax(-1))
    # 1 - p in double precision, then float32, is what transformers compares with. Of equal tokens low ids go first,
    # as with a stable sort (transformers' own choice there is up to torch.sort).
    limits = _column([1.0 - p for p in top_p], scores)
    return ~_nucleus(ranking_keys(scores, low_ids_first=False), weights, limits, FIRST_NUCLEUS)


def _nucleus(keys: Tensor, weights: Tensor, limits: Tensor, size: int) -> Tensor:
    """Mask of the tokens top-p keeps, found among the ``size`` best, and among more for rows where all those stay.

    Sums are of integers and keys are unique, so the mask is the same whatever size it was found with.
    """
    size = min(size, keys.shape[1])
    ids = top_token_ids(keys, size, low_ids_first=False)
    ranked = weights.gather(1, ids)
    from_below = weights.sum(-1, keepdim=True) - ranked.cumsum(-1) + ranked
    keep = (from_below.double() * 2.0**-WEIGHT_BITS).float() > limits
    keep[:, 0] = True  # the likeliest token stays even where rounding left it at the limit
    mask = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, ids, keep)
    if size < keys.shape[1]:
        open_rows = keep[:, -1].nonzero().squeeze(1)
        if len(open_rows):
            mask[open_rows] = _nucleus(keys[open_rows], weights[open_rows], limits[open_rows], 8 * size)
    return mask


def _column(values: Sequence[float], scores: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]
