"""Models that are refused at load, with their reasons, and models that are not: tiny random ones of many types."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from fastdecode.sworker import SModel

pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MPT = SMALL | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
GPT = SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
PHI3_LONG = LLAMA | {"original_max_position_embeddings": 32, "rope_parameters": LONG_ROPE}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5": (
        "T5Config",
        SMALL | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "encoder-decoder",
    ),
    "BERT": ("BertConfig", LLAMA | {"pad_token_id": 0}, "attends in both directions"),
    "RemBERT": ("RemBertConfig", LLAMA | {"pad_token_id": 0}, "attends in both directions"),
    "MPT without ALiBi": ("MptConfig", MPT | {"attn_config": {"alibi": False}}, "alibi False, which transformers ign"),
    "MPT with a prefix": ("MptConfig", MPT | {"attn_config": {"prefix_lm": True}}, "prefix_lm True"),
    "RoFormer": ("RoFormerConfig", LLAMA | {"is_decoder": True, "embedding_size": 32}, "0 times for its 2 layers"),
    "RWKV": ("RwkvConfig", SMALL | {"hidden_size": 32, "num_hidden_layers": 2}, "keeps a state"),
    "Phi-3 with longrope": ("Phi3Config", PHI3_LONG, "longrope rotary frequencies beyond 32 tokens"),
}

GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", GPT),
    "StableLM": ("StableLmConfig", LLAMA),
    "Gemma 3": (
        "Gemma3TextConfig",
        LLAMA | {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3, "layer_types": GEMMA3_LAYERS},
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        LLAMA
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 16, "n_routed_experts": 4}
        | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
    "Qwen2-MoE": (
        "Qwen2MoeConfig",
        LLAMA
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
        | {"num_experts_per_tok": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
}


def save_config(folder: Path, config: str, settings: dict[str, Any]) -> Path:
    """Save config.json alone; weights come from ``load_format="dummy"``."""
    getattr(transformers, config)(**settings).save_pretrained(folder)
    return folder


def load(folder: Path | str, **settings: Any) -> SModel:
    """Load the model as the engine does, without a tokenizer and in float32."""
    without: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32"}
    return SModel(EngineConfig(model=str(folder), **without | settings))


def layers_of(model: SModel) -> list[tuple[int, int, int, int, int]]:
    """Return query heads, KV heads, key and value head size, and window of each layer."""
    return [
        (layer.num_heads, layer.num_kv_heads, layer.key_head_dim, layer.value_head_dim, layer.window)
        for layer in model.layout.layers
    ]


@pytest.mark.parametrize(("config", "settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_reason(config: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(save_config(tmp_path, config, settings), load_format="dummy")
    message = str(caught.value)
    assert reason in message and "\n" not in message
    assert message.startswith(json.loads((tmp_path / "config.json").read_text())["model_type"] + ": this model")
    assert "supported are decoder-only causal language models" in message


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("GPT-2", [(4, 4, 8, 8, 0)] * 2),
        ("StableLM", [(4, 2, 8, 8, 0)] * 2),
        ("Gemma 3", [(4, 2, 16, 16, 8)] * 2 + [(4, 2, 16, 16, 0)]),
        ("DeepSeek-V3", [(4, 1, 24, 16, 0)] * 2),
        ("Qwen2-MoE", [(4, 2, 8, 8, 8), (4, 2, 8, 8, 0)]),
    ],
)
def test_accepted(name: str, layers: list[tuple[int, ...]], tmp_path: Path) -> None:
    model = load(save_config(tmp_path, *ACCEPTED[name]), load_format="dummy")
    assert layers_of(model) == layers
    assert model.vocab_size == 96 and (model.max_model_len == 64 or name == "DeepSeek-V3")
    assert (model.layout.model_dtype, model.layout.kv_dtype) == ("float32", "float32")


def test_every_layer_type_counts(tmp_path: Path) -> None:
    """With fewer layers than the model has, the list of their types is cut to fit."""
    folder = save_config(tmp_path, *ACCEPTED["Gemma 3"])
    model = load(folder, load_format="dummy", hf_overrides={"num_hidden_layers": 1}, kv_cache_dtype="bfloat16")
    assert layers_of(model) == [(4, 2, 16, 16, 8)]
    assert (model.layout.model_dtype, model.layout.kv_dtype) == ("float32", "bfloat16")


def test_longrope_is_accepted_within_the_original_length(tmp_path: Path) -> None:
    folder = save_config(tmp_path, "Phi3Config", PHI3_LONG)
    assert load(folder, load_format="dummy", max_model_len=32).max_model_len == 32
    with pytest.raises(UnsupportedModelError, match="--max-model-len 32 or less"):
        load(folder, load_format="dummy", max_model_len=33)


def test_max_model_len_is_at_most_the_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 65 is more than the model's own 64 tokens"):
        load(save_config(tmp_path, "LlamaConfig", LLAMA), load_format="dummy", max_model_len=65)


# Folders that are broken.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a whole model and return its folder."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _spoil(folder: Path, value: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, path, {"format": "pt"})


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')


BREAKAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing folder": (lambda folder: shutil.rmtree(folder), "no such folder"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "an adapter alone": (
        lambda folder: (_adapter(folder), (folder / "config.json").unlink()),
        "a LoRA adapter .*, without a model: give --model base --lora-modules NAME=",
    ),
    "an adapter beside a model": (lambda folder: _adapter(folder), "beside a model: give --model base --lora-modules"),
    "corrupt config.json": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
        "not a valid JSON file",
    ),
    "config.json of bytes": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
        "not a valid JSON file",
    ),
    "unknown model_type": (lambda folder: _edit_config(folder, model_type="wombat"), "wombat"),
    "no model_type": (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
    "wrong type": (lambda folder: _edit_config(folder, hidden_size="wide"), "hidden_size.*expected int"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "pickled weights": (_pickle, r"as \.bin files, which can hold code; convert them to safetensors"),
    "NaN weights": (lambda folder: _spoil(folder, math.nan), "its logits are NaN or infinite in float32"),
    "infinite weights": (lambda folder: _spoil(folder, math.inf), "its logits are NaN or infinite in float32"),
    "truncated weights": (_truncate, "incomplete|deserializ"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "header"),
    "tensors missing": (
        lambda folder: _edit_config(folder, num_hidden_layers=3),
        "9 tensors are missing",
    ),
    "other shapes": (
        lambda folder: _edit_config(folder, intermediate_size=64),
        r"mlp\S* has the shape .*48.* and config.json asks for .*64",
    ),
}


@pytest.mark.parametrize(("break_it", "reason"), BREAKAGES.values(), ids=BREAKAGES)
def test_a_broken_folder_is_one_clear_line(
    break_it: Callable[[Path], Any], reason: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    load(folder)
    break_it(folder)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_no_folder(saved: Path) -> None:
    with pytest.raises(ModelLoadError, match="this is a file; give the folder"):
        load(saved / "model.safetensors")


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)
    transformers.LlamaForCausalLM._from_config(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.num_parameters == sum(parameter.numel() for parameter in model.model.parameters())


@pytest.mark.parametrize(
    ("overrides", "kind", "reason"),
    [
        ({"num_hiden_layers": 1}, ModelLoadError, "hf_overrides: llama has no configuration key 'num_hiden_layers'"),
        ({"num_hidden_layers": "four"}, ModelLoadError, "hf_overrides: num_hidden_layers cannot be 'four'"),
        ({"num_hidden_layers": 0}, UnsupportedModelError, "has no layers"),
        ({"num_attention_heads": 5}, UnsupportedModelError, "one key and value per token"),
    ],
)
def test_bad_overrides(overrides: dict[str, Any], kind: type[Exception], reason: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=reason) as caught:
        load(save_config(tmp_path, "LlamaConfig", LLAMA), load_format="dummy", hf_overrides=overrides)
    assert "\n" not in str(caught.value)


def test_good_overrides(saved: Path) -> None:
    assert len(load(saved, hf_overrides={"num_hidden_layers": 1}).layout.layers) == 1


def test_a_missing_tokenizer_says_how_to_do_without(saved: Path) -> None:
    with pytest.raises(ModelLoadError, match="--skip-tokenizer-init") as caught:
        load(saved, skip_tokenizer_init=False)
    assert "\n" not in str(caught.value)
