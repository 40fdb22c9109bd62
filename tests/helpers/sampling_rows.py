"""Rows for the sampler's tests, and the results of transformers' own processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.sworker.sampling import SamplingRow

VOCAB = 500
TOLERANCE = 1e-5


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    """Return normal random logits, float32 [rows, vocab]."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def make_row(prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **fields: Any) -> SamplingRow:
    outside = {"stop_token_ids", "bad_words_token_ids", "generator_seed"}
    given_row = {name: value for name, value in fields.items() if name in outside}
    params = SamplingParams(**{name: value for name, value in fields.items() if name not in outside})
    return SamplingRow(params, list(prompt), list(output), **given_row)


def penalise_output(scores: Tensor, row: SamplingRow) -> Tensor:
    """Return ``scores`` with OpenAI's presence and frequency penalties, which transformers lacks."""
    scores = scores.clone()
    for token_id, count in Counter(row.output_token_ids).items():
        scores[0, token_id] -= row.params.frequency_penalty * count + row.params.presence_penalty
    return scores


def reference(logits: Tensor, row: SamplingRow) -> Tensor:
    """Return one row's probabilities [1, vocab] by transformers' processors, in vLLM's order."""
    params, scores = row.params, logits.clone()
    ids = torch.tensor([[*row.prompt_token_ids, *row.output_token_ids]])
    processors: list[Any] = []
    if params.allowed_token_ids:
        allowed = [token_id for token_id in params.allowed_token_ids if token_id < scores.shape[1]]
        scores = torch.full_like(scores, -torch.inf).index_copy_(1, torch.tensor(allowed), scores[:, allowed])
    if params.logit_bias:
        processors.append(hf.SequenceBiasLogitsProcessor({(i,): b for i, b in params.logit_bias.items()}))
    if params.min_tokens:
        prompt_len, stops = len(row.prompt_token_ids), sorted(row.stop_token_ids)
        processors.append(hf.MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, stops))
    if row.bad_words_token_ids:
        processors.append(hf.NoBadWordsLogitsProcessor([list(word) for word in row.bad_words_token_ids]))
    if params.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    for processor in processors:
        scores = processor(ids, scores)
    scores = penalise_output(scores, row)
    if params.temperature == 0:
        return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
    warpers: list[Any] = [hf.TemperatureLogitsWarper(params.temperature), hf.MinPLogitsWarper(params.min_p)]
    if params.top_k > 0:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1)
