"""Loads an unmodified transformers causal LM that calls FastDecode's attention function."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError
from fastdecode.core.optional import optional
from fastdecode.sworker.adapters.experts import use_padded_experts
from fastdecode.sworker.adapters.index import use_index
from fastdecode.sworker.adapters.latents import use_latent_rows
from fastdecode.sworker.adapters.own_recurrences import use_own_recurrences
from fastdecode.sworker.adapters.states import use_states
from fastdecode.sworker.files import rope
from fastdecode.sworker.files.weight_files import (
    check_files,
    check_no_adapter,
    check_not_adapted,
    check_tensors,
    weights_place,
)
from fastdecode.sworker.model import packing
from fastdecode.sworker.model.code import AnyRank
from fastdecode.sworker.model.refusals import (
    ADAPTER,
    OWN_ATTENTION,
    STATE,
    check_config,
    has_state_types,
    one_clear_error,
    one_line,
    refuse,
)
from fastdecode.sworker.run.pipeline import ATTENTION_NAME, register_attention
from fastdecode.sworker.run.staging import DTYPE_NAME, TORCH_DTYPE

WITH_PICTURES = ("kimi_k25", "mistral4")
"""Text models that transformers lists among models of images and text."""

ONE_BY_ONE = ("HF_DEACTIVATE_ASYNC_LOAD", "1")
"""Makes transformers read a checkpoint's tensors one by one, unless the user decides otherwise.

Its threads would read ahead without limit. The experts of all layers would then be in memory before the first are
joined: 1.8 times the weights, measured with FP8.
"""


def load_hf_config(config: EngineConfig) -> Any:
    """Return the model's configuration with ``hf_overrides`` applied.

    Raise ModelLoadError or UnsupportedModelError.
    """
    check_no_adapter(Path(config.model))
    with one_clear_error(config.model):
        name, named = weights_place(config.model)
        hf_config = AutoConfig.from_pretrained(
            name, revision=config.revision, trust_remote_code=config.trust_remote_code, **named
        )
        if named:
            optional("GGUF").complete(hf_config, Path(config.model))
    apply_overrides(hf_config, config.hf_overrides)
    check_config(hf_config)
    return hf_config


def auto_class(model_type: str) -> Any:
    """Return the class of transformers that builds and loads models of this type."""
    return AutoModelForImageTextToText if model_type in WITH_PICTURES else AutoModelForCausalLM


def load_model(config: EngineConfig, hf_config: Any) -> torch.nn.Module:
    """Return the whole model in evaluation mode, in ``config.dtype`` (auto: the checkpoint's own).

    Its weights stay on the device that loaded them; call ``place_model`` next.
    """
    device = resolve_device(config.device)
    if device.type == "cpu":
        optional("aligned functions").use_aligned_functions()
    adapt = _register(hf_config)
    dtype = resolve_dtype(config.dtype, hf_config)
    with one_clear_error(config.model), _quiet(), _refusing_strangers(hf_config):
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            with device:  # a GPU makes random numbers much faster
                model = auto_class(hf_config.model_type).from_config(
                    hf_config,
                    dtype=dtype,
                    attn_implementation=ATTENTION_NAME,
                    trust_remote_code=config.trust_remote_code,
                )
            if device.type == "cuda" and config.quantization in ("int4", "int8"):
                packing.quantize_dummy(model, config.quantization, device)
        else:
            check_files(Path(config.model))
            loads, name, named, form = _weights_source(config, hf_config, dtype, device)
            os.environ.setdefault(*ONE_BY_ONE)
            model, info = loads.from_pretrained(
                name,
                config=hf_config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **named,
            )
            check_tensors(config.model, info, "num_hidden_layers" in config.hf_overrides)
            if weights_place(config.model)[1]:
                optional("GGUF").check_all_taken(model, config.model)
            if form.is_kept:
                packing.say_kept(model, config.model, form)
    has_states = use_states(model) or use_own_recurrences(model)
    if not has_states and (getattr(model, "_is_stateful", False) or has_state_types(hf_config)):
        refuse(hf_config, "keeps a state beside its attention (a state-space or hybrid model)", STATE)
    with one_clear_error(config.model):
        return _ready(config, model, adapt, device)


def _ready(
    config: EngineConfig, model: Any, adapt: Callable[[torch.nn.Module], None], device: torch.device
) -> torch.nn.Module:
    """Merge the adapter and adapt attention, recurrences and experts of a loaded ``model``; return it, ready to run."""
    model = packing.unpacked(model)
    check_not_adapted(model)
    if config.lora:
        model = optional("LoRA").merged(model, Path(config.lora[1]))
    adapt(model)
    use_latent_rows(model)
    use_index(model)
    if device.type == "cpu":
        use_padded_experts(model)
    return model.eval().requires_grad_(False)


def _weights_source(
    config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Any, str | None, dict[str, Any], packing.Packing]:
    """Return (class whose ``from_pretrained`` loads the model, positional argument, named arguments, weights' form)."""
    name, named = weights_place(config.model)
    loads = auto_class(hf_config.model_type)
    remote = {"trust_remote_code": config.trust_remote_code}
    if named:  # a GGUF file
        named = optional("GGUF").weights_source(config.model)[1]
        return loads, name, named | remote | {"revision": config.revision}, packing.Packing("plain")
    form = packing.choose(config, hf_config, device)
    skeleton = partial(packing.skeleton, loads, hf_config, remote)
    form, named, kind = packing.arguments(config, hf_config, form, dtype, device, skeleton)
    if kind:  # transformers' automatic classes take no tensors as weights
        return kind, None, named, form
    return loads, name, named | remote | {"revision": config.revision}, form


def place_model(config: EngineConfig, hf_config: Any, model: torch.nn.Module, rank: AnyRank | None) -> torch.nn.Module:
    """Move ``model`` to ``config.device`` and return it; with ``rank``, keep only this rank's part of its weights."""
    with one_clear_error(config.model):  # the device may have too little memory
        if rank:
            optional("sharding").shard(model, hf_config, rank)
        device = resolve_device(config.device)
        # the weights are on the CPU already, and to() would unpack packed weights
        return model if device.type == "cpu" else model.to(device)


def _register(hf_config: Any) -> Callable[[torch.nn.Module], None]:
    register_attention()
    if hf_config.model_type in ("llama4", "llama4_text"):
        return optional("own positions").use_given_positions
    if hf_config.model_type not in OWN_ATTENTION:
        return lambda model: None
    own_attention = optional("own attention")
    own_attention.register()
    return own_attention.adapt


def resolve_device(name: str) -> torch.device:
    """Return the device of this name; "auto" is a usable GPU, else the CPU. Raise ConfigError if "cuda" has no GPU."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(f"device: 'cuda' was asked for, and torch {torch.__version__} finds no GPU it can use")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def multiplies_int8(config: EngineConfig) -> bool:
    """Return whether linear layers multiply integers: for ``int8`` on the CPU. On a GPU, torchao computes int8."""
    return config.quantization == "int8" and resolve_device(config.device).type == "cpu"


def device_name(config: EngineConfig) -> str:
    """Return the GPU that ``config`` would use; "" for the CPU."""
    return torch.cuda.get_device_name() if resolve_device(config.device).type == "cuda" else ""


def resolve_dtype(name: str, hf_config: Any) -> torch.dtype:
    """Return the dtype of this name; "auto" is the checkpoint's dtype, or float32 if the checkpoint names none."""
    if name != "auto":
        return TORCH_DTYPE[name]
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    return dtype if dtype in DTYPE_NAME else torch.float32


def max_position_embeddings(hf_config: Any) -> int:
    """Return the longest sequence that the configuration names, in tokens."""
    text_config = hf_config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"):
        if (getattr(text_config, name, None) or 0) > 0:
            return int(getattr(text_config, name))
    return 2048


def most_positions(hf_config: Any) -> int:
    """Return the longest sequence that a user may ask for, in tokens, including what a rotary scaling adds."""
    return rope.reach(hf_config.get_text_config(), max_position_embeddings(hf_config))


def num_layers(config: EngineConfig) -> int:
    """Return the number of layers of the whole model, before ``hf_overrides``."""
    return int(load_hf_config(replace(config, hf_overrides={})).get_text_config().num_hidden_layers)


def apply_overrides(hf_config: Any, overrides: dict[str, Any]) -> None:
    """Set the configuration keys ``overrides``. Lists per layer are cut or repeated to ``num_hidden_layers``.

    Raise ModelLoadError for unknown keys.
    """
    # Keys of rotary embeddings, which transformers keeps in one attribute
    rope_names = ("rope_theta", "rope_scaling", "rope_parameters")
    for name, value in overrides.items():
        if name in rope_names:
            rope.override(hf_config.get_text_config(), name, value)
            continue
        if not hasattr(hf_config, name):
            raise ModelLoadError(f"hf_overrides: {hf_config.model_type} has no configuration key {name!r}")
        try:
            setattr(hf_config, name, value)
        except Exception as error:
            raise ModelLoadError(f"hf_overrides: {name} cannot be {value!r}: {one_line(error)}") from error
    text_config = hf_config.get_text_config()
    layer_types = vars(text_config).get("layer_types")  # absent if the configuration's class derives the layer types
    if layer_types and "layer_types" not in overrides:
        number = text_config.num_hidden_layers
        text_config.layer_types = (layer_types * -(-number // len(layer_types)))[:number]


@contextlib.contextmanager
def _refusing_strangers(hf_config: Any) -> Iterator[None]:
    """Within the context, raise UnsupportedModelError for a model that does not look our attention up in transformers.

    Such a model looks the name of the attention up in a table of its own.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        refuse(hf_config, "does not call transformers' attention interface", ADAPTER)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
