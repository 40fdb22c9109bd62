"""Loading an unmodified transformers causal LM whose attention will be ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from fastdecode.config import EngineConfig
from fastdecode.errors import ModelLoadError, UnsupportedModelError
from fastdecode.sworker.lanes import ATTENTION_NAME, register_attention
from fastdecode.sworker.staging import DTYPE_NAME, TORCH_DTYPE

SUPPORTED = "decoder-only causal language models whose attention goes through transformers' AttentionInterface"


def load_hf_config(config: EngineConfig) -> Any:
    """The model's configuration with ``hf_overrides`` applied; ModelLoadError or UnsupportedModelError."""
    with _one_clear_error(config.model):
        hf_config = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    _apply_overrides(hf_config, config.hf_overrides)
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model}: {hf_config.model_type} is an encoder-decoder model; supported are {SUPPORTED}"
        )
    return hf_config


def load_model(config: EngineConfig, hf_config: Any) -> torch.nn.Module:
    """The model in evaluation mode on ``config.device``, in ``config.dtype`` (auto: the checkpoint's own)."""
    register_attention()
    dtype = resolve_dtype(config.dtype, hf_config)
    with _one_clear_error(config.model), _quiet():
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            model = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=config.trust_remote_code,
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                config.model,
                config=hf_config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
            )
    return model.to("cpu" if config.device == "auto" else config.device).eval().requires_grad_(False)


def resolve_dtype(name: str, hf_config: Any) -> torch.dtype:
    """``auto`` is the checkpoint's dtype, float32 where it names none."""
    if name != "auto":
        return TORCH_DTYPE[name]
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    return dtype if dtype in DTYPE_NAME else torch.float32


def max_position_embeddings(hf_config: Any) -> int:
    """The longest sequence the model was made for, in tokens."""
    text_config = hf_config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
        if getattr(text_config, name, None):
            return int(getattr(text_config, name))
    return 2048


def _apply_overrides(hf_config: Any, overrides: dict[str, Any]) -> None:
    """Set known configuration keys; per-layer lists are cut to a smaller ``num_hidden_layers``."""
    for name, value in overrides.items():
        if not hasattr(hf_config, name):
            raise ModelLoadError(f"hf_overrides: {hf_config.model_type} has no configuration key {name!r}")
        setattr(hf_config, name, value)
    text_config = hf_config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types and "layer_types" not in overrides:
        text_config.layer_types = layer_types[: text_config.num_hidden_layers]


@contextlib.contextmanager
def _one_clear_error(model: str) -> Iterator[None]:
    """Whatever loading raises becomes one line that names the model."""
    try:
        yield
    except (ModelLoadError, UnsupportedModelError):
        raise
    except Exception as error:
        raise ModelLoadError(f"cannot load {model!r}: {_reason(model, error)}") from error


def _reason(model: str, error: Exception) -> str:
    folder = Path(model)
    if not folder.exists() and (folder.is_absolute() or model.startswith(".")):
        return "no such folder; give a folder with config.json and safetensors files, or a model id"
    if folder.is_dir() and not (folder / "config.json").exists():
        return "the folder has no config.json"
    if isinstance(error, json.JSONDecodeError):
        return f"config.json is not valid JSON ({error})"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
