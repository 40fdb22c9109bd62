"""The tokens that a layer attends are read off its model's masks, at positions where rules differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import model_zoo
from transformers import masking_utils

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import UnsupportedModelError
from fastdecode.sworker.adapters.masks import Asked, Sight
from fastdecode.sworker.model.support import probe_layout
from fastdecode.sworker.model.transformers_code import TransformersCode
from fastdecode.sworker.run.pipeline import register_attention

causal = masking_utils.causal_mask_function
PADDING = torch.zeros(1, dtype=torch.long)
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MASK_ALONE = ("PhimoeConfig", model_zoo.llama_like(sliding_window=24) | EXPERTS)
"""A model whose attention calls name no window."""
NEEDS_ROWS = ("AfmoeConfig", model_zoo.llama_like(sliding_window=24, head_dim=16) | EXPERTS)
"""A model that takes attention's results for rows that lie one after another."""


@pytest.mark.parametrize(
    ("function", "size", "sight"),
    [
        (causal, 0, Sight()),
        (masking_utils.sliding_window_causal_mask_function(1), 1, Sight(1)),
        (masking_utils.sliding_window_causal_mask_function(4096), 4096, Sight(4096)),
        (masking_utils.sliding_window_causal_mask_function(4095), 4096, None),
        (masking_utils.chunked_causal_mask_function(24, torch.zeros(1)), 24, Sight(24, chunked=True)),
        (masking_utils.chunked_causal_mask_function(25, torch.zeros(1)), 24, None),
        (masking_utils.sliding_window_bidirectional_mask_function(4096), 4096, None),
        (masking_utils.bidirectional_mask_function, 0, None),
        (masking_utils.and_masks(causal, lambda b, h, q, k: (q - k) % 2 == 0), 0, None),
        (masking_utils.or_masks(causal, lambda b, h, q, k: (q == 0) & (k == 1)), 0, None),
        (masking_utils.or_masks(causal, masking_utils.blockwise_overlay(torch.zeros(1, 16))), 0, None),
    ],
)
def test_a_mask_is_a_rule_that_we_know_or_none(function: Any, size: int, sight: Sight | None) -> None:
    assert Asked(torch.ones(1, 1, 2, 2, dtype=torch.bool), function, size).sight() == sight


def built(config: str, settings: dict[str, Any]) -> Any:
    """Return a random model in which FastDecode's attention can be called."""
    register_attention()
    torch.manual_seed(0)
    made = getattr(transformers, config)(
        vocab_size=96, bos_token_id=None, eos_token_id=None, pad_token_id=None, **settings
    )
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="fastdecode").eval()


def test_a_window_that_only_the_mask_knows_is_found_and_no_mask_is_made_after_it() -> None:
    model = built(*MASK_ALONE)
    assert [layer.window for layer in probe_layout(TransformersCode(model), model.config, "auto").layers] == [24] * 3
    assert model.config._attn_implementation == "fastdecode"


def test_a_mask_of_another_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model hides every other token, as no model of transformers does yet."""
    model = built("LlamaConfig", model_zoo.llama_like())
    module = transformers.models.llama.modeling_llama

    def striped(**arguments: Any) -> Any:
        return masking_utils.create_causal_mask(**arguments, and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0)

    monkeypatch.setattr(module, "create_causal_mask", striped)
    with pytest.raises(UnsupportedModelError, match="llama: this model asks for a mask that is neither causal nor"):
        probe_layout(TransformersCode(model), model.config, "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [MASK_ALONE, ("AfmoeConfig", model_zoo.llama_like(sliding_window=24, head_dim=16) | EXPERTS)]
)
def test_such_models_match_generate(recipe: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts have 40 and 128 tokens, so they are longer than the window."""
    monkeypatch.setitem(model_zoo.RECIPES, "this", model_zoo.Recipe(recipe[0], 0.15, 1, recipe[1]))
    monkeypatch.setattr(model_zoo, "NEW_TOKENS", 12)
    model_zoo.save_model("this", tmp_path)
    prompts = model_zoo.prompts("this")[1:4]
    with LLM(str(tmp_path), skip_tokenizer_init=True, kv_cache_memory="64MiB", s_threads=1, r_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == model_zoo.generate(model_zoo.build_model("this"), prompts).tokens
