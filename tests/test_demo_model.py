"""The model that ships with the package: what transformers makes of its folder, and how good it is."""

from __future__ import annotations

import ast
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastdecode

FOLDER = Path(fastdecode.__file__).parent / "demo_model"
PERPLEXITY_BOUND = 4.5
"""Per byte, over the first 8 KB of heldout.txt; a little above what the model reached there."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32).eval()


def test_sizes(model: Any) -> None:
    assert sum(p.numel() for p in model.parameters()) <= 3_000_000
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000
    assert model.config.num_key_value_heads < model.config.num_attention_heads


def test_any_text_makes_the_round_trip_through_its_bytes(tokenizer: Any) -> None:
    rng = random.Random(0)
    ranges = ((0, 128), (128, 0x800), (0x800, 0xD800), (0x10000, 0x110000))
    for length in range(60):
        text = "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(length))
        ids = tokenizer(text)["input_ids"]
        assert ids == [tokenizer.bos_token_id, *text.encode()]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_id_of_the_tokenizer_is_in_the_models_vocabulary(tokenizer: Any, model: Any) -> None:
    assert len(tokenizer) <= model.config.vocab_size
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (256, 257, 258)
    assert ids == (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id)
    assert model.generation_config.eos_token_id == 257


def test_heldout_perplexity(model: Any) -> None:
    data = np.frombuffer((FOLDER / "heldout.txt").read_bytes()[:8192], np.uint8).astype(np.int64).reshape(8, 1024)
    ids = torch.from_numpy(np.concatenate([np.full((8, 1), 256), data], axis=1))
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert math.exp(float(loss)) < PERPLEXITY_BOUND


def test_greedy_completion_is_python(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer("def read_lines(self, path):\n", return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    lines = tokenizer.decode(out[0], skip_special_tokens=True).split("\n")[:-1]
    longest = next(n for n in range(len(lines), 0, -1) if n == 1 or is_python("\n".join(lines[:n])))
    assert longest >= 3, "\n".join(lines)


def is_python(text: str) -> bool:
    """Whether the text parses."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
