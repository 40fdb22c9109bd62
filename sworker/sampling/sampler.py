"""Sampler: from the logits of one step to one token per row, vectorised over the batch and independent of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastdecode.sworker.sampling.draw import draw, uniform
from fastdecode.sworker.sampling.logits import edited_logits
from fastdecode.sworker.sampling.logprobs import Logprobs, raw_logprobs
from fastdecode.sworker.sampling.probabilities import probabilities
from fastdecode.sworker.sampling.row import SampledToken, SamplingRow

__all__ = ["SampledToken", "Sampler", "SamplingRow", "distribution"]

CHUNK_ELEMENTS = 2**21
"""Logits handled at once where temporaries are needed; bounds them to about 50 MB, whatever the batch."""

FAILED = -1
"""Token id of a row without a usable logit."""


class Sampler:
    """Chooses the next token of every row; it keeps nothing between calls.

    A row's token depends on its own logits, tokens and seed only: the same bit for bit alone and in a crowd.
    """

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token per row; rows with NaN or +inf, or with no token left to choose, come back as failed.

        ``logits``: float32, float16 or bfloat16 [num_rows, vocab] on any device, not changed.

        Raises:
            ValueError: the shape of ``logits`` does not fit ``rows``.
        """
        _check(logits, rows)
        if not rows:
            return []
        best = logits.max(dim=-1)  # one pass for the likeliest token and for what ``_failed`` looks at
        tokens = best.indices.masked_fill(~best.values.isfinite(), FAILED)
        for part in _chunks([i for i, row in enumerate(rows) if not row.plain], logits.shape[1]):
            index = torch.tensor(part, device=logits.device)
            chosen = _choose(logits.index_select(0, index), [rows[i] for i in part])
            tokens[index] = chosen.masked_fill(tokens[index] == FAILED, FAILED)
        token_ids: list[int] = tokens.tolist()
        logprobs = _requested_logprobs(logits, rows, token_ids)
        return [SampledToken(token_id, logprobs.get(i), token_id == FAILED) for i, token_id in enumerate(token_ids)]


def distribution(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The probabilities ``Sampler.sample`` draws from: float32 [num_rows, vocab].

    Greedy rows hold a single 1; rows that would fail hold zeros. ``logits`` as in ``Sampler.sample``, not changed.
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


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Tokens of rows that are not plain: int64 [num_rows], ``FAILED`` where every token is banned."""
    scores = edited_logits(logits, rows)
    failed = _failed(scores)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(random) == len(rows):  # the common case: no argmax and no copy of the random rows
        return _drawn(scores, rows).masked_fill_(failed, FAILED)
    tokens = scores.argmax(-1)
    if random:
        index = torch.tensor(random, device=logits.device)
        tokens[index] = _drawn(scores.index_select(0, index), [rows[i] for i in random])
    return tokens.masked_fill_(failed, FAILED)


def _drawn(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Random tokens, int64 [num_rows]; overwrites the scores. Output length counts a row's draws so far."""
    probs = probabilities(scores, [row.params for row in rows])
    return draw(probs, uniform([row.generator_seed for row in rows], [len(row.output_token_ids) for row in rows]))


def _failed(scores: Tensor) -> Tensor:
    """Rows that cannot be sampled, bool [num_rows]: the maximum is finite unless there is NaN, +inf or only -inf."""
    return ~scores.amax(-1).isfinite()


def _requested_logprobs(logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]) -> dict[int, Logprobs]:
    """Log-probabilities by row, for the rows that asked and did not fail."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and token_ids[i] != FAILED]
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
