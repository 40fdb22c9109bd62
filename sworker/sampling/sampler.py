"""The sampler: one token per row from the logits of a step. A row's token does not depend on its batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastdecode import _sworker
from fastdecode.core.weighing import AttentionSource
from fastdecode.sworker.sampling.logits import SamplingRow, edited_logits
from fastdecode.sworker.sampling.probabilities import draw, probabilities, ranking_keys, top_token_ids, uniform

CHUNK_ELEMENTS = 2**21
"""Most logits processed at a time, so that temporary tensors take at most about 50 MB."""

EXCLUDED = -2
"""Token id that marks a row with usable logits for which the request's limits leave no token."""


Logprobs = dict[int, tuple[float, int]]
"""Maps a token id to (log-probability, rank from 1)."""


class SampledToken(NamedTuple):
    """The sampler's answer for one row.

    ``logprob`` maps token ids to (log-probability, rank from 1) if requested: the chosen token, then the likeliest in
    order. ``failed``: the logits hold NaN or +inf, or no token is left to choose; ``token_id`` is then -1.
    ``excluded``: the row failed because the request's limits leave no token. ``sources``: the blocks of context with
    the most attention, if requested; the engine adds them.
    """

    token_id: int
    logprob: Logprobs | None = None
    failed: bool = False
    excluded: bool = False
    sources: tuple[AttentionSource, ...] | None = None


class Sampler:
    """Chooses the next token of every row. Nothing is kept between calls.

    A row's token depends only on its own logits, tokens and seed: it is the same bit for bit in any batch.
    """

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Return one token per row. A row with NaN or +inf, or without a token to choose, is returned as failed.

        ``logits``: float32, float16 or bfloat16 [num_rows, vocab] on any device, not changed.

        Raises:
            ValueError: the shape of ``logits`` does not fit ``rows``.
        """
        _check(logits, rows)
        if not rows:
            return []
        tokens = _likeliest(logits)
        for part in _chunks(
            [i for i, row in enumerate(rows) if len(row.output_token_ids) < row.plain_from], logits.shape[1]
        ):
            index = torch.tensor(part, device=logits.device)
            chosen = _choose(logits.index_select(0, index), [rows[i] for i in part])
            tokens[index] = chosen.masked_fill(tokens[index] < 0, -1)
        token_ids: list[int] = tokens.tolist()
        logprobs = _requested_logprobs(logits, rows, token_ids)
        return [
            SampledToken(token_id, logprobs.get(i))
            if token_id >= 0
            else SampledToken(-1, None, True, token_id == EXCLUDED)
            for i, token_id in enumerate(token_ids)
        ]


def distribution(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the probabilities from which ``Sampler.sample`` draws: float32 [num_rows, vocab].

    A greedy row has probability 1 for its token; a row that would fail has zeros. ``logits``: as in ``Sampler.sample``.
    """
    _check(logits, rows)
    if not rows:
        return torch.zeros(logits.shape, device=logits.device)
    scores = edited_logits(logits, rows)
    failed = _failed(logits) | _failed(scores)
    best = scores.argmax(-1, keepdim=True)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    probs = torch.zeros_like(scores).scatter_(1, best, 1.0)
    if random:
        probs[random] = probabilities(scores[random], [rows[i].params for i in random])
    return probs.masked_fill_(failed[:, None], 0.0)


def _likeliest(logits: Tensor) -> Tensor:
    """Return the first largest of each row: int64 [num_rows]. It is -1 if the row holds NaN or +inf, or only -inf."""
    if logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16):
        dense, tokens = logits.contiguous(), np.empty(len(logits), np.int64)
        bits = (dense if logits.dtype == torch.float32 else dense.view(torch.uint16)).numpy()
        _sworker.choose_likeliest(bits, tokens, torch.get_num_threads())
        return torch.from_numpy(tokens)
    best = logits.max(dim=-1)
    return best.indices.masked_fill(~best.values.isfinite(), -1)


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the tokens of rows with edited logits or random draws: int64 [num_rows], ``EXCLUDED`` if none is left."""
    scores = edited_logits(logits, rows)
    failed = _failed(scores)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(random) == len(rows):  # if all rows draw, argmax and a copy of scores are not needed
        return _drawn(scores, rows).masked_fill_(failed, EXCLUDED)
    tokens = scores.argmax(-1)
    if random:
        index = torch.tensor(random, device=logits.device)
        tokens[index] = _drawn(scores.index_select(0, index), [rows[i] for i in random])
    return tokens.masked_fill_(failed, EXCLUDED)


def _drawn(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw a random token per row, int64 [num_rows]; overwrite the scores. Draws depend on the output's length."""
    probs = probabilities(scores, [row.params for row in rows])
    return draw(probs, uniform([row.generator_seed for row in rows], [len(row.output_token_ids) for row in rows]))


def _failed(scores: Tensor) -> Tensor:
    return ~scores.amax(-1).isfinite()


def _requested_logprobs(logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]) -> dict[int, Logprobs]:
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and token_ids[i] >= 0]
    found: dict[int, Logprobs] = {}
    for part in _chunks(asked, logits.shape[1]):
        chosen = logits.index_select(0, torch.tensor(part, device=logits.device))
        counts = [rows[i].params.logprobs or 0 for i in part]
        found.update(zip(part, raw_logprobs(chosen, [token_ids[i] for i in part], counts), strict=True))
    return found


def _chunks(indices: Sequence[int], vocab: int) -> Iterator[list[int]]:
    size = max(1, CHUNK_ELEMENTS // vocab)
    for start in range(0, len(indices), size):
        yield list(indices[start : start + size])


def _check(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    if logits.dim() != 2 or logits.shape[0] != len(rows) or logits.shape[1] == 0:
        raise ValueError(f"logits must be [num_rows={len(rows)}, vocab], got shape {list(logits.shape)}")


def raw_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Return, by row, log-probabilities of the chosen token and of the ``counts[row]`` likeliest tokens (-1: all).

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
    chosen = {ids[0]: (values[0], chosen_rank)}
    likeliest = {ids[rank]: (values[rank], rank) for rank in range(1, count + 1)}
    return chosen | likeliest


def num_accepted(sampled: list[SampledToken], draft_token_ids: list[int]) -> int:
    """Return how many of ``draft_token_ids`` are accepted: all before the first that differs from the sampled token.

    ``sampled``: one token more than there are drafts, each sampled as if all earlier drafts were right.
    """
    for count, (token, draft) in enumerate(zip(sampled, draft_token_ids, strict=False)):
        if token.token_id != draft:
            return count
    return len(draft_token_ids)
