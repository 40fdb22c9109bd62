"""GGUF files of tiny transformers models, in the form of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""llama.cpp's names of models that have another name in transformers."""

TOKENS = ["<s>", "</s>", "<unk>", *(chr(code) for code in range(33, 127)), "Ġ", "ab"]
"""A byte-level vocabulary of 99 tokens."""


def write(file: Path, model: Any, keys: Mapping[str, Any] | None = None, **tensors: Any) -> Path:
    """Write ``model`` to ``file``; ``keys`` and ``tensors`` add to its own or replace them; None removes a key.

    A key without a leading dot belongs to the architecture.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, arch)
    told = shape_keys(config) | tokenizer_keys() | dict(keys or {})
    for key, value in told.items():
        if value is not None:
            _add_key(writer, key if key.startswith(("tokenizer.", "general.", "split.")) else f"{arch}.{key}", value)
    for name, each in (model_tensors(model, arch) | tensors).items():
        if each is not None:
            writer.add_tensor(name, np.ascontiguousarray(each, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def shape_keys(config: Any) -> dict[str, Any]:
    """Return the keys of a model's shape."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "norm_epsilon", None),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }


def tokenizer_keys() -> dict[str, Any]:
    """Return the keys of a byte-level tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
    }


def model_tensors(model: Any, arch: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return a model's tensors under llama.cpp's names, in its order of rows."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {}
    for name, each in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, leaf = name.rpartition(".")
        weights = each.detach().float()
        if stem.endswith(".experts"):
            found |= _experts(f"blk.{stem.split('.')[2]}", leaf, weights)
            continue
        if arch == "llama" and ".self_attn." in name and stem.endswith(("q_proj", "k_proj")):
            heads = model.config.num_attention_heads if "q_proj" in stem else model.config.num_key_value_heads
            weights = _interleaved(weights, heads)
        if arch in ("gemma2", "gemma3") and "norm" in stem:
            weights = weights + 1
        if stem.endswith("shared_expert_gate"):
            weights = weights[0]
        found[f"{names.get_name(stem)}.{leaf}"] = weights.numpy()
    return found


def _experts(block: str, leaf: str, weights: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of all experts of a layer: gate and up are two tensors."""
    if leaf == "down_proj":
        return {f"{block}.ffn_down_exps.weight": weights.numpy()}
    gate, up = weights.chunk(2, dim=1)
    return {f"{block}.ffn_gate_exps.weight": gate.numpy(), f"{block}.ffn_up_exps.weight": up.numpy()}


def _interleaved(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of q or k in llama.cpp's order: pairs that rotate together are neighbors."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "tokenizer.chat_template" or isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, [int(each) if isinstance(each, gguf.TokenType) else each for each in value])
