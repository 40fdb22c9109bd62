"""Random draws of one token by its scores: first filters of the distribution, then the draw.

Temperature comes first, then min-p, top-k and top-p, as in vLLM, with the definitions of transformers' warpers. A stage
changes only the rows that use it.

A draw is a pure function of seed, position, and the row's probabilities. A counter-based generator (splitmix64's
finalizer, Steele et al. 2014) gives each row one uniform number. The token is found by inverting the cumulative
distribution. Sums are of integers, which are exact in any order, and tokens are ranked by unique integer keys. So a
row's result is the same bit for bit with any other rows, and on any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fastdecode.api.sampling_params import SamplingParams

FIRST_NUCLEUS = 256
"""Tokens ranked at first for top-p.

Most nuclei are smaller, and ranking a whole large vocabulary costs 30 times more.
"""

_ID_MASK = 2**32 - 1

WEIGHT_BITS = 50
"""Probabilities become integers in units of 2**-50. Their sum stays below 2**53, so it is exact in float64 too."""

_GOLDEN = 0x9E3779B97F4A7C15

_MASK = 2**64 - 1


def probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities from which tokens are drawn, after all filters: float32 [num_rows, vocab].

    ``scores``: float32 [num_rows, vocab], contiguous, overwritten. A row with NaN or +inf, or without a finite score,
    gets meaningless values; other rows are not affected.
    """
    scores.div_(_column([p.temperature for p in params], scores))
    vocab = scores.shape[1]
    _filter(scores, {i: p.min_p for i, p in enumerate(params) if p.min_p > 0.0}, _min_p)
    _filter(scores, {i: float(p.top_k) for i, p in enumerate(params) if 0 < p.top_k < vocab}, _top_k)
    _filter(scores, {i: p.top_p for i, p in enumerate(params) if p.top_p < 1.0}, _top_p)
    return scores.softmax(-1)


def _filter(scores: Tensor, values: dict[int, float], dropped: Callable[[Tensor, list[float]], Tensor]) -> None:
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
    """Return, as bool, which tokens score below the k-th best. Tokens that score like the k-th best stay."""
    best = scores.topk(int(max(top_k)), dim=-1).values
    last_kept = torch.tensor([int(k) - 1 for k in top_k], device=scores.device)
    return scores < best.gather(1, last_kept[:, None])


def _top_p(scores: Tensor, top_p: list[float]) -> Tensor:
    """Return the tokens to drop: with all less likely tokens, such a token has a probability of at most 1 - p."""
    weights = integer_weights(scores.softmax(-1))
    # Like transformers, compute 1 - p in double precision and compare in float32. Among equally likely tokens, low ids
    # are dropped first, as by a stable sort (transformers' own sort is not stable).
    limits = _column([1.0 - p for p in top_p], scores)
    return ~_nucleus(ranking_keys(scores, low_ids_first=False), weights, limits, FIRST_NUCLEUS)


def _nucleus(keys: Tensor, weights: Tensor, limits: Tensor, size: int) -> Tensor:
    """Return the tokens that top-p keeps: a token's weight plus all lower-ranked tokens' weights exceeds the limit.

    The ``size`` likeliest tokens are examined first, and more in rows where all of these stay. The mask does not depend
    on ``size``, since sums are of integers and keys are unique.
    """
    size = min(size, keys.shape[1])
    ids = top_token_ids(keys, size, low_ids_first=False)
    ranked = weights.gather(1, ids)
    from_below = weights.sum(-1, keepdim=True) - ranked.cumsum(-1) + ranked
    keep = (from_below.double() * 2.0**-WEIGHT_BITS).float() > limits
    keep[:, 0] = True  # the likeliest token stays even if rounding excludes it
    mask = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, ids, keep)
    if size < keys.shape[1]:
        open_rows = keep[:, -1].nonzero().squeeze(1)
        if len(open_rows):
            mask[open_rows] = _nucleus(keys[open_rows], weights[open_rows], limits[open_rows], 8 * size)
    return mask


def _column(values: Sequence[float], scores: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]


def ranking_keys(scores: Tensor, *, low_ids_first: bool) -> Tensor:
    """Return integer keys that sort like the scores; no two are equal, since token ids break ties.

    ``scores``: float32 [num_rows, vocab] without NaN. Returns int64 of the same shape: the score's bits, reordered to
    compare as integers, above 32 bits of token id.
    """
    bits = (scores + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered << 32) | (_ID_MASK - ids if low_ids_first else ids)


def top_token_ids(keys: Tensor, count: int, *, low_ids_first: bool) -> Tensor:
    """Return each row's ``count`` token ids with the highest keys, highest first: int64 [num_rows, count]."""
    ids = keys.topk(count, dim=-1).values & _ID_MASK
    return _ID_MASK - ids if low_ids_first else ids


def sample_seed(request_seed: int, sample_index: int) -> int:
    """Return the ``generator_seed``, 64 bits unsigned, of sample ``sample_index`` (from 0) of a seeded request."""
    first = _mix(np.array([request_seed & _MASK], dtype=np.uint64))
    return int(first[0]) ^ (sample_index * _GOLDEN & _MASK)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return one random number in [0, 1) per row: float64 [num_rows], from 64-bit seeds and non-negative positions."""
    stream = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    counter = (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix(stream + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integer_weights(probs: Tensor) -> Tensor:
    """Return probabilities, float32 [num_rows, vocab], as int64 in units of 2**-50."""
    return (probs * 2.0**WEIGHT_BITS).to(torch.int64)


def draw(probs: Tensor, uniforms: np.ndarray) -> Tensor:
    """Return a token per row, int64 [num_rows]: the first whose cumulative probability exceeds its uniform number.

    ``probs``: float32 [num_rows, vocab], each row summing to about 1. ``uniforms``: float64 [num_rows] in [0, 1). A
    token of probability 0 is never returned.
    """
    cumulative = integer_weights(probs).cumsum(-1)
    total = cumulative[:, -1:].double()
    # A float64 below 1, times the total, rounds to less than the total, so a token of positive weight is always found.
    target = (torch.from_numpy(uniforms).to(probs.device)[:, None] * total).to(torch.int64)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _mix(state: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer, a bijection of uint64 that changes about half of all bits for any changed bit."""
    state = state + np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))
