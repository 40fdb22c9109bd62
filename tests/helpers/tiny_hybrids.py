"""Tiny models with recurrent layers, and the tokens that transformers generates with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastdecode.sworker.model.loader import auto_class
from helpers import model_zoo
from helpers.recorded_texts import recorded_or
from helpers.tiny_configs import tiny_config

OTHER_DECODES = ("nemotron_h", "zamba2")
"""Models that in transformers bound time steps for prompts but not for decodes.
Each of their tokens is computed with all earlier ones.
"""


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, 120, (length,), generator=generator).tolist() for length in lengths]


def built(model_type: str, **changes: int) -> Any:
    """Return a model of random weights; ``changes`` override its configuration."""
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model_zoo.WEIGHT_SEED)  # for decays, which keep the values that they begin with
        model = auto_class(model_type).from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model_zoo.randomised(model, 0.4, 0.15)


def save_with_texts(
    folder: Path, model_type: str, prompts: list[list[int]], num_tokens: int, **changes: int
) -> list[list[int]]:
    """Save a model of random weights in ``folder``; return its greedy tokens after each prompt."""
    model = built(model_type, **changes)
    model.save_pretrained(folder)
    tokens = [generated(model, prompt, num_tokens) for prompt in prompts]
    assert len({token for each in tokens for token in each}) > 16, "tokens that vary"
    return tokens


def saver(
    root: Path, prompts: list[list[int]], num_tokens: int, **changes: int
) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """Return a function that saves a tiny model once per model type, and returns its folder and expected tokens."""

    @cache
    def save(model_type: str) -> tuple[Path, list[list[int]]]:
        folder = root / model_type
        return folder, save_with_texts(folder, model_type, prompts, num_tokens, **changes)

    return save


def generated(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens of a model that has no states of earlier texts."""

    def generate() -> list[int]:
        _forget_texts(model)
        caches = model.config.model_type not in OTHER_DECODES
        text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens, use_cache=caches)[0]
        tokens: list[int] = text[len(prompt) :].tolist()
        return tokens

    _forget_texts(model)
    return recorded_or(generate, model, prompt, num_tokens)


def _forget_texts(model: Any) -> None:
    """Reset the states that RecurrentGemma keeps in its layers.

    The model would continue from an earlier text's state for a prompt of one token.
    """
    for each in model.modules():
        if hasattr(each, "conv1d_state"):
            each.conv1d_state = None
