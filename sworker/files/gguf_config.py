"""Sets in the configuration what transformers' GGUF reader drops, or refuses the file.

The reader knows some keys of each architecture. It silently drops all other keys, and the tensors that scale rotary
frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata

from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.files import gguf_rope


def complete(hf_config: Any, file: Path) -> None:
    """Set in ``hf_config`` what ``file`` says and transformers' reader dropped.

    Raise ModelLoadError for an unknown key that may change the model's arithmetic.
    """
    metadata, tensors = read_gguf_metadata(str(file))
    arch = metadata["general.architecture"]
    own = {name.removeprefix(f"{arch}."): each for name, each in metadata.items() if name.startswith(f"{arch}.")}
    keys = {gguf_rope.OTHER_NAMES.get(name, name): each for name, each in own.items()}
    _check_kind(metadata, file)
    # End-of-text ids by kind of tokenizer, for files that name none
    usual_end = {"llama": 2}
    if "tokenizer.ggml.eos_token_id" not in metadata:
        hf_config.eos_token_id = usual_end.get(metadata.get("tokenizer.ggml.model", ""))
    if "tokenizer.ggml.padding_token_id" not in metadata:
        hf_config.pad_token_id = None  # the default id of the configuration's class may exceed the vocabulary
    # Numbers of layers of the Gemmas that scale scores by the hidden size per head, as in llama.cpp
    large_gemmas = {"gemma2": 46, "gemma3": 62}
    if arch not in GGUF_CONFIG_ARCHS:  # transformers reads every key of the listed architectures
        _set_attributes(hf_config, arch, keys, file)
        _set_biases(hf_config, tensors)
        if arch in large_gemmas:
            large = keys["block_count"] == large_gemmas[arch]
            heads = hf_config.hidden_size // hf_config.num_attention_heads
            hf_config.query_pre_attn_scalar = heads if large else hf_config.head_dim
        if arch == "gpt2":
            hf_config.n_positions = keys.get("context_length", hf_config.n_positions)
    if arch != "gemma4":  # transformers' rotary embeddings of Gemma 4 need no change
        gguf_rope.set_rope(hf_config, keys, tensors, file, whole=arch not in GGUF_CONFIG_ARCHS)


def _check_kind(metadata: Mapping[str, Any], file: Path) -> None:
    """Raise ModelLoadError if ``file`` holds something other than a model, or only one part of a model."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelLoadError(f"cannot load {str(file)!r}: general.type is {kind!r}, not a model")
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ModelLoadError(
            f"cannot load {str(file)!r}: it is part {metadata.get('split.no', 0) + 1} of {parts}: join them by "
            "llama-gguf-split --merge, and give the file that comes out"
        )


def _set_attributes(hf_config: Any, arch: str, keys: Mapping[str, Any], file: Path) -> None:
    # Configuration attributes for each key; the first attribute that the model has is set
    attributes: dict[str, tuple[str, ...]] = {
        "attention.key_length": ("head_dim",),
        "attention.value_length": ("v_head_dim", "head_dim"),
        "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        "attention.sliding_window": ("sliding_window",),
        "attn_logit_softcapping": ("attn_logit_softcapping",),
        "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
        "attention.shared_kv_layers": ("num_kv_shared_layers",),
        "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "expert_weights_norm": ("norm_topk_prob",),
        "final_logit_softcapping": ("final_logit_softcapping",),
        "logit_scale": ("logit_scale",),
        "use_parallel_residual": ("use_parallel_residual",),
    }
    # Gemma 4's keys, since it has heads of two sizes
    gemma4 = {"attention.key_length": ("global_head_dim",), "attention.key_length_swa": ("head_dim",)}
    known = attributes | (gemma4 if arch == "gemma4" else {})
    # Keys for which 0 means none, as in llama.cpp
    none_by_zero = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    # Keys with the size of a head. Models without an attribute for this size derive it from the hidden size.
    head_lengths = ("attention.key_length", "attention.value_length")
    for key, value in keys.items():
        name = next((each for each in known.get(key, ()) if hasattr(hf_config, each)), None)
        if not value and key in none_by_zero:
            value = None
        if name is not None:
            if not _is_close(getattr(hf_config, name), value):
                setattr(hf_config, name, value)
        elif key == "attention.sliding_window_pattern":
            _set_pattern(hf_config, value)
        elif key in head_lengths and value == gguf_rope.head_dim(hf_config):
            continue
        elif not _is_understood(arch, key, value):
            raise ModelLoadError(
                f"cannot load {str(file)!r}: {arch}.{key} is {str(value)[:80]}, which this model of transformers does "
                "not have, and which changes the text: give the folder that the file was made from"
            )


def _is_understood(arch: str, key: str, value: Any) -> bool:
    """Return whether this module may ignore ``key``: other code reads it, or its value has no effect."""
    # Keys that transformers reads for every architecture
    read = {
        "attention.head_count",
        "attention.head_count_kv",
        "block_count",
        "context_length",
        "decoder_start_token_id",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "shortconv.l_cache",
        "vocab_size",
    }
    # Keys that do not change a causal model's arithmetic
    without_effect = {
        "attention.causal",
        "nextn_predict_layers",
        "pooling_type",
        "rope.scaling.finetuned",
        "tensor_data_layout",
    }
    if key in read | gguf_rope.KEYS | without_effect or not value or key.startswith(("mm.", "vision.")):
        return True
    # llama.cpp's number for softmax in expert_gating_func
    routed_by_softmax = 1
    if key == "expert_gating_func":
        return bool(value == routed_by_softmax) or arch == "minimax-m2"
    if arch == "gemma4":
        return key.startswith(("rope.", "attention.value_length"))
    return arch == "mamba" and key.startswith("ssm.")


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * abs(one)
    return bool(one == other)


def _set_pattern(hf_config: Any, pattern: Any) -> None:
    """Set which layers have a sliding window: where ``pattern`` is true, or in all but each ``pattern``-th layer."""
    number = hf_config.num_hidden_layers
    windowed = pattern if isinstance(pattern, list) else [(index + 1) % pattern != 0 for index in range(number)]
    hf_config.layer_types = ["sliding_attention" if each else "full_attention" for each in windowed[:number]]


def _set_biases(hf_config: Any, tensors: tuple[str, ...]) -> None:
    # Attributes that turn biases on, and the names of tensors that show that the file has these biases
    biases = {
        "attention_bias": (".attn_q.bias", ".attn_k.bias", ".attn_v.bias"),
        "mlp_bias": (".ffn_gate.bias", ".ffn_up.bias"),
    }
    for name, ends in biases.items():
        if getattr(hf_config, name, None) is False and any(each.endswith(ends) for each in tensors):
            setattr(hf_config, name, True)
