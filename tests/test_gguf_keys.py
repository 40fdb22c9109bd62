"""Keys and tensors of GGUF files that change the arithmetic or the ends of texts are used, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gguf_files
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.files.generation import generation_defaults
from fastdecode.sworker.model.loader import load_hf_config, load_model
from fastdecode.sworker.model.tokenizer import HFTokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
IDS = torch.randint(3, 99, (1, 300), generator=torch.Generator().manual_seed(3))


def build(config: Any) -> Any:
    """Return a model of random weights, with biases and norms that matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def read(file: Path, **settings: Any) -> Any:
    config = EngineConfig(model=str(file), device="cpu", dtype="float32", **settings)
    model: Any = load_model(config, load_hf_config(config))
    model.set_attn_implementation("eager")
    return model


def check_same(file: Path, model: Any) -> None:
    """Assert that the file's model has the folder's logits, which differ without the key."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wanted, found = model(IDS).logits, read(file)(IDS).logits
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


def llama3_factors(factor: float, low: float, high: float, original: int, base: float, dim: int) -> list[float]:
    """Return what llama.cpp's converter writes as rope_freqs.weight."""
    factors = []
    for index in range(0, dim, 2):
        wave_length = 2 * math.pi * base ** (index / dim)
        if wave_length < original / high:
            factors.append(1.0)
        elif wave_length > original / low:
            factors.append(factor)
        else:
            smooth = (original / wave_length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128,
}  # fmt: skip
LONG = [1.0 + index / 2 for index in range(8)]
SHORT = [1.0 + index / 8 for index in range(8)]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": LONG, "short_factor": SHORT, "factor": 4.0,
    "attention_factor": 1.19, "original_max_position_embeddings": 128,
}  # fmt: skip
LONGROPE_KEYS = {
    "rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 128,
}  # fmt: skip
LINEAR_KEYS = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
UNSCALED = GEMMA3_ROPE | {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}

SCALINGS: dict[str, tuple[type, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        LlamaConfig, {"rope_parameters": LLAMA3}, {},
        {"rope_freqs.weight": llama3_factors(8, 1, 4, 128, 1e4, 16)},
    ),
    "linear": (LlamaConfig, {"rope_parameters": LINEAR}, LINEAR_KEYS, {}),
    "linear without its kind": (LlamaConfig, {"rope_parameters": LINEAR}, {"rope.scaling.factor": 4.0}, {}),
    "linear of old files": (LlamaConfig, {"rope_parameters": LINEAR}, {"rope.scale_linear": 4.0}, {}),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}, YARN_KEYS, {}),
    "yarn of Qwen 2": (Qwen2Config, {"rope_parameters": YARN}, YARN_KEYS, {}),
    "yarn with its ends": (
        LlamaConfig, {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}},
        YARN_KEYS | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}, {},
    ),
    "yarn with a factor": (
        LlamaConfig, {"rope_parameters": YARN | {"attention_factor": 1.5 * (0.1 * math.log(4) + 1)}},
        YARN_KEYS | {"rope.scaling.attn_factor": 1.5}, {},
    ),
    "longrope": (
        Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}, LONGROPE_KEYS,
        {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT},
    ),
    "none": (
        LlamaConfig, {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {},
    ),
    "another base": (LlamaConfig, {"rope_theta": 5e5}, {}, {}),
    "no base": (Qwen2Config, {"rope_theta": 10000.0}, {"rope.freq_base": None}, {}),
    "a base that transformers drops": (Starcoder2Config, {"rope_theta": 5e5}, {}, {}),
    "a part of each head": (Phi3Config, {"partial_rotary_factor": 0.5}, {}, {}),
    "heads of another size": (Qwen3Config, {"head_dim": 32}, {}, {}),
    "a window": (Phi3Config, {"sliding_window": 64}, {"attention.sliding_window": 64}, {}),
    "no window": (Phi3Config, {"sliding_window": None}, {"attention.sliding_window": 0}, {}),
    "soft caps": (
        Gemma2Config, {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "head_dim": 16,
                       "tie_word_embeddings": True,
                       "query_pre_attn_scalar": 16, "sliding_window": 64},
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "attention.sliding_window": 64}, {},
    ),
    "Gemma 3 of another converter": (
        Gemma3TextConfig, {"rope_parameters": UNSCALED,
                           "head_dim": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 16,
                           "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        {"rope.freq_base": None, "rope.global.freq_base": 1e6, "rope.local.freq_base": 20000.0,
         "attention.sliding_window": 64, "attention.sliding_window_pattern": 2}, {},
    ),
    "Gemma 3": (
        Gemma3TextConfig, {"rope_parameters": GEMMA3_ROPE, "head_dim": 16,
                       "tie_word_embeddings": True, "query_pre_attn_scalar": 16,
                           "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 20000.0,
         "attention.sliding_window": 64, "attention.sliding_window_pattern": 2}, {},
    ),
    "experts": (
        Qwen3MoeConfig, {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                         "norm_topk_prob": True}, {"expert_gating_func": 1}, {},
    ),
    "experts beside a shared one": (
        Qwen2MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                         "shared_expert_intermediate_size": 48}, {}, {},
    ),
    "biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    kind, settings, keys, tensors = SCALINGS[name]
    model = build(kind(**(SHAPE | settings)))
    check_same(gguf_files.write(tmp_path / "tiny.gguf", model, keys, **tensors), model)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build(LlamaConfig(**SHAPE))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a scaling": ({"rope.scaling.type": "ntk", "rope.scaling.factor": 2.0}, {}, "rope.scaling.type 'ntk' .* not under"),
    "a factor without a kind": ({"rope.scaling.attn_factor": 1.5}, {}, "attn_factor 1.5 .* is not understood"),
    "longrope without tensors": ({"rope.scaling.type": "longrope"}, {}, "'longrope' .* no tensors of factors"),
    "another rule of yarn": (
        YARN_KEYS | {"rope.scaling.yarn_ext_factor": 0.5}, {}, "llama.rope.scaling.yarn_ext_factor is 0.5",
    ),
    "a clamp": ({"attention.clamp_kqv": 8.0}, {}, "llama.attention.clamp_kqv is 8.0, which this model of transformers"),
    "scaled logits": ({"logit_scale": 0.1}, {}, "llama.logit_scale is 0.1"),
    "scaled scores": ({"attention.scale": 0.1}, {}, "llama.attention.scale is 0.1"),
    "experts": ({"expert_weights_scale": 2.5}, {}, "llama.expert_weights_scale is 2.5"),
    "a part of each head": ({"rope.dimension_count": 8}, {}, "rope.dimension_count is 8, and llama rotates all 16"),
    "a tensor": (
        {}, {"blk.0.attn_q_norm.weight": [1.0] * 16}, "no parameter for 1 of the file's tensors, blk.0.attn_q_norm.wei",
    ),
    "a bias of one product": ({}, {"blk.0.attn_q.bias": [1.0] * 64}, "tensors are missing"),
    "a part of a model": ({"split.count": 2, "split.no": 0}, {}, "part 1 of 2: join them"),
    "an adapter": ({"general.type": "adapter"}, {}, "general.type is 'adapter', not a model"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "tensors", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_refused_by_name(
    keys: dict[str, Any], tensors: dict[str, Any], reason: str, llama: Any, tmp_path: Path
) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", llama, keys, **tensors)
    with pytest.raises(ModelLoadError, match=reason) as found:
        read(file)
    assert "\n" not in str(found.value)


def ends(file: Path) -> list[int]:
    config = EngineConfig(model=str(file))
    return generation_defaults(config, load_hf_config(config))[1]


def test_every_id_that_ends_a_text_counts(llama: Any, tmp_path: Path) -> None:
    def written(**keys: Any) -> Path:
        named = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
        return gguf_files.write(tmp_path / "tiny.gguf", llama, named)

    assert ends(written(eos_token_id=2)) == [2]
    assert ends(written(eos_token_id=2, eot_token_id=7)) == [2, 7]
    assert ends(written(eos_token_id=2, eot_token_id=7, eom_token_id=8)) == [2, 7, 8]
    assert ends(written(eos_token_id=None, eot_token_id=7)) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert ends(written(eot_token_id=7)) == [2, 9, 1, 7]


TOKENS: dict[str, tuple[dict[str, Any], Callable[[HFTokenizer], Any], Any]] = {
    "no BOS": ({}, lambda found: found.encode("ab"), [98]),
    "BOS": ({"ggml.add_bos_token": True}, lambda found: found.encode("ab"), [0, 98]),
    "no BOS of Llama 3": (
        {"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, lambda found: found.encode("ab"), [98],
    ),
    "BOS of Llama 3": ({"ggml.pre": "llama-bpe"}, lambda found: found.encode("ab"), [0, 98]),
    "BOS and EOS": (
        {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, lambda found: found.encode("ab"), [0, 98, 1],
    ),
    "whole words": (
        {"ggml.pre": "llama-bpe", "ggml.tokens": [*gguf_files.TOKENS[:-2], "cd", "ab"], "ggml.merges": ["c d"]},
        lambda found: found.encode("ab"), [0, 98],
    ),
    "a template": (
        {"chat_template": "{{ messages[0].content }}!"},
        lambda found: found.encode_chat([{"role": "user", "content": "ab"}]), [98, 3],
    ),
    "a template for tools": (
        {"chat_template": "{{ messages[0].content }}", "chat_template.tool_use": "{{ messages[0].content }}!"},
        lambda found: found.encode_chat(
            [{"role": "user", "content": "ab"}], tools=[{"type": "function", "function": {"name": "f"}}]
        ), [98, 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_are_those_that_the_file_asks_for(name: str, llama: Any, tmp_path: Path) -> None:
    keys, tokens, wanted = TOKENS[name]
    named = {f"tokenizer.{key}": value for key, value in keys.items()}
    file = gguf_files.write(tmp_path / "tiny.gguf", llama, named)
    assert tokens(HFTokenizer(EngineConfig(model=str(file)))) == wanted


def test_an_unknown_way_to_split_text_is_said(llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", llama, {"tokenizer.ggml.pre": "some-new-one"})
    HFTokenizer(EngineConfig(model=str(file)))
    (record,) = caplog.records
    assert "text is split as GPT-2 does it, since the way 'some-new-one'" in record.getMessage()


@pytest.mark.parametrize("space", [True, False])
def test_a_space_before_the_text_is_the_file_s(space: bool, llama: Any, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{code:02X}>" for code in range(64)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    tokens = [*pieces, *(f"x{index}" for index in range(99 - len(pieces)))]
    told = {
        "model": "llama", "tokens": tokens, "scores": [-float(index) for index in range(99)], "token_type": None,
        "merges": None, "add_bos_token": False, "add_space_prefix": space, "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{name}": value for name, value in told.items()}
    file = gguf_files.write(tmp_path / "tiny.gguf", llama, keys)
    tokenizer = HFTokenizer(EngineConfig(model=str(file)))
    assert tokenizer.encode("ab a") == [tokens.index(each) for each in (("▁ab", "▁a") if space else ("ab", "▁a"))]
    assert tokenizer.backend.decode(tokenizer.encode("ab a")) == "ab a"
