"""The references of the exactness tests can fail, and do not depend on rounding."""

from __future__ import annotations

import importlib
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import model_zoo, recorded_texts
from helpers.examples import thinned
from helpers.model_zoo import ARCHITECTURES, NEW_TOKENS, RECIPES

pytestmark = pytest.mark.slow

# Each change is what a mistake in attention would amount to.
MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 59}),
    ("mistral", {"sliding_window": 61}),
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"sliding_window": 31}),
    ("gemma2", {"sliding_window": 33}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gpt_oss", {"sliding_window": 31}),
    ("gpt_oss", {"sliding_window": 33}),
]


def steps_that_differ(name: str, model: Any) -> list[int]:
    """Return for each prompt at how many steps the model would not choose the reference's token."""
    pairs = zip(model_zoo.prompts(name), model_zoo.reference(name).tokens, strict=True)
    return [model_zoo.disagreements(model, prompt, tokens) for prompt, tokens in pairs]


@pytest.mark.parametrize("name", thinned(ARCHITECTURES, 4))
def test_reference_can_fail(name: str) -> None:
    prompts, found, model = model_zoo.prompts(name), model_zoo.reference(name), model_zoo.build_model(name)
    assert [len(prompt) for prompt in prompts] == model_zoo.prompt_lengths(name)
    assert [len(tokens) for tokens in found.tokens] == [NEW_TOKENS] * len(prompts)
    assert min(len(set(tokens)) for tokens in found.tokens) >= RECIPES[name].distinct_tokens
    assert found.min_gap >= 1e-4  # The recorded tokens are therefore the same on any processor.
    assert steps_that_differ(name, model) == [0] * len(prompts)
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        assert model_zoo.disagreements(model, model_zoo.with_other_start(prompt), tokens), len(prompt)


@pytest.mark.parametrize("name", thinned(ARCHITECTURES, 4, 1))
def test_reference_needs_attention(name: str) -> None:
    def nothing(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(query.transpose(1, 2)), None

    transformers.AttentionInterface.register("zoo_nothing", nothing)
    model = model_zoo.build_model(name)
    model.set_attn_implementation("zoo_nothing")
    for key, module in model.named_modules():  # Some models do not call it.
        if key.endswith(("attention.dense", "attn.out_proj")):
            module.register_forward_pre_hook(lambda _, rows: (torch.zeros_like(rows[0]),))
    assert min(steps_that_differ(name, model)) > NEW_TOKENS // 2


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_reference_notices_a_mistake(name: str, mistake: dict[str, Any]) -> None:
    differ = steps_that_differ(name, model_zoo.build_model(name, **mistake))
    assert sum(steps > 0 for steps in differ) > len(differ) // 2, differ  # The shortest texts hardly exceed a window.


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("falcon-rw", "falcon.modeling_falcon.build_alibi_tensor"),
        ("bloom", "bloom.modeling_bloom._get_alibi_slopes"),
        ("mpt", "mpt.modeling_mpt.build_mpt_alibi_tensor"),
    ],
)
def test_reference_notices_slopes_of_other_heads(name: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute = f"transformers.models.{function}".rsplit(".", 1)
    own = getattr(importlib.import_module(module), attribute)
    monkeypatch.setattr(f"{module}.{attribute}", lambda *args, **options: own(*args, **options).roll(1, dims=0))
    assert min(steps_that_differ(name, model_zoo.build_model(name))) > 0


def test_reference_notices_missing_sinks() -> None:
    model = model_zoo.build_model("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    assert min(steps_that_differ("gpt_oss", model)) > 0


@pytest.mark.parametrize("name", thinned(list(ARCHITECTURES), 2))
def test_saved_model_is_the_same(name: str, tmp_path: Path) -> None:
    model_zoo.save_model(name, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    built = model_zoo.build_model(name).state_dict()
    assert loaded.keys() == built.keys()
    assert all(torch.equal(loaded[key], value) for key, value in built.items())
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.eos_token_id, config.tie_word_embeddings) == (None, False)


def test_recorded_tokens_are_used_only_where_the_model_prefers_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_zoo.build_model("llama-gqa"), model_zoo.prompts("llama-gqa")[2]
    right = list(model_zoo.reference("llama-gqa").tokens[2][:5])
    key = f"llama {zlib.crc32(repr(prompt).encode()):08x}"
    monkeypatch.setattr(recorded_texts, "SEES_ALL", False)
    for place in (None, 0, 2, 4):
        known = [token + (number == place) for number, token in enumerate(right)]
        monkeypatch.setattr(recorded_texts, "recorded", lambda known=known: {key: known})
        assert recorded_texts.recorded_or(list, model, prompt, 5) == (right if place is None else [])
    assert recorded_texts.recorded_or(list, model, prompt, 6) == [], "too few are recorded"
