"""Log-probabilities of prompt tokens, from the logits of the rows before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fastdecode.core.step import MiniBatch
from fastdecode.sworker.sampling.sampler import CHUNK_ELEMENTS, Logprobs, raw_logprobs


class ScoredPrompt(NamedTuple):
    """A prompt to score, and how many of the likeliest tokens to report per position (-1: all)."""

    token_ids: Sequence[int]
    num_top: int


class PromptScores(NamedTuple):
    """Log-probabilities of the tokens of a prompt from position ``start`` on, computed in one step."""

    start: int
    logprobs: list[Logprobs]


def score_prompts(
    mini_batches: Sequence[MiniBatch], logits: Sequence[Tensor], prompts: Mapping[int, ScoredPrompt]
) -> tuple[list[Tensor], dict[int, PromptScores]]:
    """Return (logits of the sampling rows, scores of those ``prompts`` that have rows in ``mini_batches``).

    ``logits``: [rows, vocab] of each mini-batch that is not empty, in order, including rows of scored prompts.
    """
    sampling: list[Tensor] = []
    scores: dict[int, PromptScores] = {}
    for mini_batch, found in zip((each for each in mini_batches if len(each)), logits, strict=True):
        kept: list[int] = []
        row = 0
        for chunk in mini_batch.chunks[mini_batch.chunks["scored"] | mini_batch.chunks["samples"]]:
            end = row + (int(chunk["num_rows"]) if chunk["scored"] else 1)
            if chunk["scored"] and not chunk["is_decode"]:
                prompt = prompts[int(chunk["sequence_id"])]
                start = int(chunk["context_len"]) + 1
                scores[int(chunk["sequence_id"])] = _score(found[row:end], prompt, start)
                row = end - int(chunk["samples"])
            kept += range(row, end)
            row = end
        sampling.append(found[kept])
    return sampling, scores


def _score(logits: Tensor, prompt: ScoredPrompt, start: int) -> PromptScores:
    """Return the log-probabilities of the tokens of ``prompt`` from position ``start`` on.

    ``logits``: one row before each of these tokens. At the prompt's end a last row follows, which is not used here.
    """
    targets = list(prompt.token_ids[start : start + len(logits)])
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    found: list[Logprobs] = []
    for first in range(0, len(targets), size):
        part = targets[first : first + size]
        found += raw_logprobs(logits[first : first + len(part)], part, [prompt.num_top] * len(part))
    return PromptScores(start, found)
