"""Finds the shape of a model by name, or reads it from a transformers ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from fastdecode.perfmodel.index_shape import (
    BLOCK_SPARSE,
    INDEXED,
    IndexShape,
    read_index_shape,
    with_transformers_names,
)
from fastdecode.perfmodel.known_models import BUILT_IN, cached_config, known_name
from fastdecode.perfmodel.latent_shape import read_latent_shape
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.model_sizes import FORMATS, format_of
from fastdecode.perfmodel.state_shape import (
    RECURRENT,
    HybridLayers,
    read_hybrid_layers,
    read_state_shape,
)
from fastdecode.perfmodel.unknown_kinds import check_layer_types, check_names, unknown_kind

_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
}

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

_PLAIN_MLP = {
    "opt",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "phi",
    "starcoder2",
    "falcon",
    "bloom",
    "mpt",
    "gptj",
    "codegen",
    "gpt_neox_japanese",
    "openai-gpt",
    "xglm",
    "nemotron",
    "nemotron_h",
}
"""Model types whose MLP has two matrices; all others count as gated."""

_TIED = {"opt", "gpt2", "gpt_bigcode", "gpt_neo", "gemma", "gemma2", "gemma3", "gemma3_text", "falcon", "bloom", "mpt"}
"""Model types that tie input and output embeddings unless the file says otherwise."""


def find_shape(name_or_path: str) -> ModelShape:
    """Return the shape of a built-in name, a hub id, a model folder or a ``config.json``.

    Raise ModelLoadError if there is none.
    """
    built_in = BUILT_IN.get(name_or_path.lower())
    if built_in:
        return built_in
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists() and name_or_path.count("/") == 1:
        if cached := cached_config(name_or_path):
            path = cached
        elif name := known_name(name_or_path):
            return BUILT_IN[name]
    if not path.is_file():
        raise ModelLoadError(
            f"{name_or_path}: no such model folder or config.json, and not one of the names or hub's ids known here "
            f"({', '.join(BUILT_IN)})"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return read_shape(config, name_or_path)


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape in a transformers configuration.

    Raise ModelLoadError for a missing key, UnsupportedModelError for attention or weights that the equations do not
    cover.
    """
    whole, config = config, config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"{name}: text_config must be a JSON object, not {config!r}")
    check_names(config, name)
    if unknown := unknown_kind(whole) or unknown_kind(config):
        raise UnsupportedModelError(f"{name}: {unknown}")
    config = with_transformers_names(config)
    hybrid = read_hybrid_layers(config, name)
    config = _without_recurrent(config, hybrid) if hybrid else config
    check_layer_types(config, name)
    sizes: dict[str, Any] = {field: _first(config, keys, name) for field, keys in _KEYS.items()}
    num_experts = next((config[key] for key in _EXPERTS if config.get(key)), 1)
    kind = config.get("model_type", "")
    try:
        latent, index = read_latent_shape(config, name), read_index_shape(config, sizes["num_layers"])
        dense_layers = _dense_layers(config) if num_experts > 1 else 0
        return ModelShape(
            name=name,
            **sizes,
            num_kv_heads=1 if latent else _num_kv_heads(config, sizes["num_heads"]),
            head_dim=latent.row_dim if latent else _head_dim(config, sizes),
            intermediate_size=_intermediate_size(config, sizes["hidden_size"], num_experts > 1),
            mlp_matrices=2 if kind in _PLAIN_MLP else 3,
            tied_embeddings=config.get("tie_word_embeddings", kind in _TIED),
            num_experts=num_experts,
            experts_per_token=next((config[key] for key in _EXPERTS_PER_TOKEN if config.get(key)), 1),
            shared_intermediate_size=_shared_intermediate_size(config),
            dtype=_dtype(config),
            windows=_windows(config, hybrid.attending if hybrid else sizes["num_layers"], index),
            chunked="chunked_attention" in (config.get("layer_types") or ()),
            latent=latent,
            dense_layers=dense_layers,
            dense_intermediate_size=_dense_intermediate_size(config) if dense_layers else 0,
            index=index,
            state=read_state_shape(config, hybrid.recurrent, name) if hybrid else None,
            mlp_layers=hybrid.mlps if hybrid else 0,
            gated_attention=kind.startswith(("qwen3_next", "qwen3_5")),  # queries are projected twice
            beside_attention=_beside_attention(config),
            max_context=_max_context(config),
            weight_bits=_weight_bits(whole),
        )
    except (TypeError, KeyError, ZeroDivisionError, ConfigError) as error:
        raise ModelLoadError(f"{name}: the configuration cannot be right: {error}") from None


def _without_recurrent(config: Mapping[str, Any], hybrid: HybridLayers) -> Mapping[str, Any]:
    """Return a hybrid's ``config`` with the types of attending layers only, and sizes under the usual keys."""
    changed: dict[str, Any] = {"num_hidden_layers": hybrid.attending + hybrid.recurrent}
    changed["layer_types"] = [each for each in config.get("layer_types") or () if each not in RECURRENT]
    if not hybrid.experts:
        changed |= dict.fromkeys((*_EXPERTS, "num_experts_per_tok", "n_shared_experts"))
    if config.get("model_type") == "recurrent_gemma":
        changed |= {
            "sliding_window": config["attention_window_size"],
            "intermediate_size": config["intermediate_size"] // 2,
        }
    if config.get("model_type") == "zamba2":
        changed["head_dim"] = config["attention_head_dim"]
    if config.get("model_type") == "granitemoehybrid" and not config.get("num_local_experts"):
        changed |= {"intermediate_size": config["shared_intermediate_size"], "shared_intermediate_size": 0}
    return {**config, **changed}


def _beside_attention(config: Mapping[str, Any]) -> int:
    """Return how many parameters an attending layer has besides its attention projections and its MLP.

    Zamba2 also projects queries, keys and values from the embedding. Its attending layers have a further projection,
    and adapters of a shared MLP. Shared weights count for each layer that reads them.
    """
    if config.get("model_type") != "zamba2":
        return 0
    hidden, rank = config["hidden_size"], config["adapter_rank"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    adapters = rank * (hidden + 2 * config["intermediate_size"])
    return hidden * config["attention_head_dim"] * heads + hidden * hidden + adapters


def _windows(config: Mapping[str, Any], num_layers: int, index: IndexShape | None) -> tuple[int, ...]:
    """Return each layer's attention window or chunk length in tokens, 0 for none. An index's picks count as a window.

    Return () if no layer has a window.
    """
    picked = index.top_tokens if index else 0
    window = (config.get("use_sliding_window") is not False and config.get("sliding_window")) or 0
    sees = {"sliding_attention": window, "chunked_attention": config.get("attention_chunk_size") or 0}
    sees |= {INDEXED: picked, BLOCK_SPARSE: picked}
    # Types of models in which each second, fourth or sixth layer has no window, unless the file says otherwise
    patterns = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
    every = config.get("sliding_window_pattern") or patterns.get(config.get("model_type", ""), num_layers + 1)
    first = config.get("max_window_layers") or 0
    windows = [0 if index < first or (index + 1) % every == 0 else window for index in range(num_layers)]
    if config.get("layer_types"):
        windows = [sees.get(each, 0) for each in config["layer_types"]]
    elif picked:
        windows = [picked] * num_layers
    elif config.get("model_type") == "gpt_neo":
        windows = [config["window_size"] if each == "local" else 0 for each in config["attention_layers"]]
    return tuple(windows) if any(windows) else ()


def _weight_bits(config: Mapping[str, Any]) -> float:
    """Return the bits per stored weight of the layers; 0 if the checkpoint is not quantized."""
    quantization = config.get("quantization_config")
    return FORMATS[format_of(quantization) or ""] if quantization else 0.0


def _max_context(config: Mapping[str, Any]) -> int:
    """Return the longest context in ``config``, in tokens, extended by rotary scaling; 0 if ``config`` names none."""
    contexts = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    longest = next((config[key] for key in contexts if isinstance(config.get(key), int)), 0)
    scaling = config.get("rope_scaling") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    stretched = int(original * factor) if isinstance(factor, int | float) and isinstance(original, int) else 0
    return max(longest, stretched, 0)


def _first(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        if config.get(key):
            return config[key]
    raise ModelLoadError(f"{name}: the configuration has no {' or '.join(keys)}")


def _head_dim(config: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    return config.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"]


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers of a model with experts have a dense MLP instead."""
    kinds = config.get("mlp_layer_types")
    if "moe_layers" in config:  # a key of Llama 4
        return config["num_hidden_layers"] - len(config["moe_layers"])
    if "expert_layer_period" in config:  # a key of Jamba
        layers = range(config["num_hidden_layers"])
        return sum(i % config["expert_layer_period"] != config["expert_layer_offset"] for i in layers)
    given = config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0
    return list(kinds).count("dense") if kinds else given


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    """Return the number of KV heads. Falcon's new architecture has several, even with ``multi_query``."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or num_heads


def _intermediate_size(config: Mapping[str, Any], hidden_size: int, has_experts: bool) -> int:
    if has_experts and config.get("moe_intermediate_size"):
        return config["moe_intermediate_size"]
    intermediate = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    given = next((config[key] for key in intermediate if config.get(key)), None)
    if given and config.get("block_auto_adjust_ff_dim"):  # a key of LFM2
        of, multiple = int(2 * given / 3), config["block_multiple_of"]
        return -(-int(config["block_ffn_dim_multiplier"] * of) // multiple) * multiple
    return given or config.get("expansion_ratio", 4) * hidden_size


def _shared_intermediate_size(config: Mapping[str, Any]) -> int:
    num_shared = config.get("n_shared_experts") or config.get("num_shared_experts") or 0
    shared = num_shared * (config.get("moe_intermediate_size") or 0)
    if "moe_layers" in config:
        return config["intermediate_size"]
    named = config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size")
    return named or shared


def _dense_intermediate_size(config: Mapping[str, Any]) -> int:
    return config.get("dense_intermediate_size") or config.get("intermediate_size_mlp") or config["intermediate_size"]


def _dtype(config: Mapping[str, Any]) -> str:
    """Return the weights' dtype in ``config``; bfloat16 if ``config`` names none that the S-worker supports."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in ITEM_BYTES else "bfloat16"
