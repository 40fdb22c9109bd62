"""Greedy tokens of tiny models after prompts, recorded so that tests need not generate them by transformers."""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from helpers.examples import SEES_ALL

RECORDED = Path(__file__).parents[1] / "recorded_texts.json"
"""Recorded tokens. Tests that run with RECORDS in the environment, in one process, add those that they generate."""
RECORDS = "FASTDECODE_TEST_RECORDS"


def recorded_or(generate: Callable[[], list[int]], model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the recorded greedy tokens after ``prompt``, or those that ``generate`` returns.

    Recorded tokens are used if one forward shows that the model prefers each of them; that costs as much as one token.
    """
    key = f"{model.config.model_type} {zlib.crc32(repr(prompt).encode()):08x}"
    known = recorded().get(key, [])[:num_tokens]
    if len(known) == num_tokens and not SEES_ALL and _prefers(model, prompt, known):
        return known
    tokens = generate()
    if RECORDS in os.environ:
        rows = {**json.loads(RECORDED.read_text()), key: tokens}
        lines = ",\n".join(f" {json.dumps(each)}: {rows[each]}" for each in sorted(rows))
        RECORDED.write_text(f"{{\n{lines}\n}}\n")
    return tokens


def greedy_texts(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return transformers' greedy tokens after each prompt, without an end of text."""

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        exactly = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **exactly)[0]
        tokens: list[int] = text[len(prompt) :].tolist()
        return tokens

    return [recorded_or(partial(generate, prompt), model, prompt, num_tokens) for prompt in prompts]


@functools.cache
def recorded() -> dict[str, list[int]]:
    """Return the recorded tokens by model type and a hash of the prompt."""
    found: dict[str, list[int]] = json.loads(RECORDED.read_text())
    return found


@torch.no_grad()
def _prefers(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Return whether the model prefers each of ``tokens`` after the prompt and the tokens before it."""
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == tokens)
