"""How well a model predicts a text through the R-workers' cache: the quality meter for quantized caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode.engine import LLMEngine
from fastdecode.errors import ConfigError


@dataclass(frozen=True)
class Perplexity:
    """``exp`` of the mean negative log-likelihood (natural log) over ``num_tokens`` predicted tokens."""

    num_tokens: int
    perplexity: float
    bits_per_byte: float


def measure_perplexity(
    engine: LLMEngine, text: str, window: int, on_window: Callable[[], None] = lambda: None
) -> Perplexity:
    """Perplexity of ``text``, cut into windows of ``window`` tokens that are each predicted from their first token.

    Every token's attention, the prompt's too, runs on an R-worker over keys and values as the cache stores them.
    """
    if engine.s_model.tokenizer is None:
        raise ConfigError("perplexity is measured on text: it needs the tokenizer (no --skip-tokenizer-init)")
    windows = cut(engine.s_model.tokenizer.encode(text), window)
    if not windows:
        raise ConfigError("the text is too short: it must have at least two tokens")
    logprobs = []
    for token_ids in windows:
        logprobs.append(engine.score(token_ids))
        on_window()
    scores = np.concatenate(logprobs)
    nats = -float(scores.mean())
    return Perplexity(len(scores), math.exp(nats), nats * len(scores) / math.log(2) / len(text.encode()))


def cut(token_ids: Sequence[int], window: int) -> list[list[int]]:
    """Windows that share their border token, so that every token but the first is predicted once."""
    starts = range(0, len(token_ids) - 1, window - 1)
    return [list(token_ids[start : start + window]) for start in starts]
