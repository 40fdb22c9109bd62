"""The sizes of a model that the performance model needs, from a configuration or from a loaded model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastdecode.api.config import EngineConfig
from fastdecode.perfmodel.model_config import read_shape
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.model_sizes import FORMATS, format_of
from fastdecode.sworker.model import checkpoints
from fastdecode.sworker.model.held import bits_of
from fastdecode.sworker.model.loader import load_hf_config, multiplies_int8, resolve_device, resolve_dtype
from fastdecode.sworker.model.packing import choose
from fastdecode.sworker.run.staging import DTYPE_NAME


def model_shape(config: EngineConfig, hf_config: Any = None) -> ModelShape:
    """Return the sizes of the model that ``config`` loads, as the performance model sees them.

    Raise UnsupportedModelError for a kind of model that the performance model's equations do not cover.
    """
    hf_config = hf_config or load_hf_config(config)
    device = resolve_device(config.device)
    bits = planned_bits(config, hf_config, device)
    plain = {name: value for name, value in hf_config.to_dict().items() if name != "quantization_config"}
    dtype = DTYPE_NAME[resolve_dtype(config.dtype, hf_config)]
    shape = replace(read_shape(plain, config.model), dtype=dtype, weight_bits=bits)
    return replace(shape, multiplies_int8=multiplies_int8(config))


def loaded_shape(config: EngineConfig, hf_config: Any, model: torch.nn.Module) -> ModelShape:
    """Return the sizes of the loaded ``model``, with the bits per weight that its weights take in memory."""
    shape = model_shape(config, hf_config).absorbing(config.latent_absorption == "r")
    if not shape.multiplies_int8:
        shape = replace(shape, weight_bits=bits_of(model))
    return shape.keeping_states(config.state_on == "s")


def planned_bits(config: EngineConfig, hf_config: Any, device: torch.device) -> float:
    """Return the bits per weight that the layers of ``config``'s model will have; 0.0 if they stay plain."""
    if config.quantization == "int8":
        return 8.0 if device.type == "cpu" else FORMATS["int8"]
    if config.quantization == "int4":
        return FORMATS["gptq"]
    settings = checkpoints.quantization(hf_config)
    kept = settings and choose(config, hf_config, device).is_kept
    return FORMATS.get(format_of(settings) or "", 0.0) if kept else 0.0
