"""Finds out why the performance model's equations do not cover a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdecode.core.errors import ModelLoadError, UnsupportedModelError
from fastdecode.perfmodel.index_shape import (
    BLOCK_SPARSE,
    INDEXED,
)
from fastdecode.perfmodel.model_sizes import format_of
from fastdecode.perfmodel.state_shape import (
    NONE_ATTENDS,
    has_kinds,
)


def unknown_kind(config: Mapping[str, Any]) -> str | None:
    """Return why the equations do not cover the model with this ``config``; None if no reason is found."""
    kind, classes = str(config.get("model_type") or "model"), config.get("architectures") or ()
    # Models without a layer that attends
    states_alone = ("mamba", "mamba2", "falcon_mamba")
    if kind in states_alone:
        return NONE_ATTENDS
    # Beginnings of keys of recurrent models and hybrids
    recurrent = ("mamba_", "ssm_", "linear_conv", "conv_L_cache", "state_size", "attention_hidden_size", "lru_width")
    has_state = any(key.startswith(recurrent) for key in config) and not has_kinds(config)
    # Recurrent models that the equations cover only with a list of layer types, if at all
    recurrent_kinds = ("rwkv", "xlstm", "zamba2")
    if has_state or (kind in recurrent_kinds and not has_kinds(config)):
        return f"a recurrent state ({kind}) is not in the equations"
    if config.get("is_encoder_decoder"):
        return "encoder–decoder is not in the equations"
    # Ends of names of classes that generate text
    generates = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    if classes and not any(str(each).endswith(generates) for each in classes):
        return f"{classes[0]} generates no text, so it has no KV cache to plan for"
    # Parts of names of models that attend in both directions, unless they say that they are decoders
    encoders = ("bert", "electra", "mpnet", "clip")
    if not classes and any(part in kind for part in encoders) and not config.get("is_decoder"):
        return f"{kind} generates no text, so it has no KV cache to plan for"
    if config.get("num_kv_shared_layers"):
        return "layers that share a cache (num_kv_shared_layers) are not in the equations"
    quantization = config.get("quantization_config")
    if quantization and format_of(quantization) is None:
        return f"weights quantized by {quantization.get('quant_method')} are not in the equations; plan the plain model"
    return None


def check_names(config: Mapping[str, Any], name: str) -> None:
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list | tuple) or not all(isinstance(each, str) for each in layer_types):
        raise ModelLoadError(f"{name}: layer_types must be a list of names, one per layer, not {layer_types!r}")


def check_layer_types(config: Mapping[str, Any], name: str) -> None:
    known = {"full_attention", "attention", "sliding_attention", "chunked_attention", INDEXED, BLOCK_SPARSE}
    if kinds := set(config.get("layer_types") or ()) - known:
        raise UnsupportedModelError(f"{name}: {', '.join(sorted(kinds))} is not in the equations")
