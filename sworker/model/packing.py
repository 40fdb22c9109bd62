"""Decides whether a checkpoint's weights stay packed and which code unpacks them, and reports the reason.

On a GPU they stay packed if transformers has a quantizer for the format, or if our layers can unpack them in each
forward (`kept.py`). On the CPU, products of plain weights are faster, so weights are unpacked unless ``--quantization``
names the format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from transformers.integrations.hub_kernels import get_kernel, lazy_load_kernel
from transformers.quantizers.auto import AutoHfQuantizer

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError
from fastdecode.core.optional import optional
from fastdecode.sworker.model import checkpoints
from fastdecode.sworker.model.held import weight_bytes

logger = logging.getLogger(__name__)

How = Literal["plain", "theirs", "ours", "unpacked"]
"""The form of weights: never packed, with transformers' quantizer, in layers of ours, or unpacked as they are read."""


@dataclass(frozen=True)
class Packing:
    """The form in which a checkpoint's weights are kept in memory, and the reason."""

    how: How
    method: str = ""
    why: str = ""

    @property
    def is_kept(self) -> bool:
        return self.how in ("theirs", "ours")


def choose(config: EngineConfig, hf_config: Any, device: torch.device) -> Packing:
    """Return the form in which to keep the weights of ``config``'s model. Raise ConfigError if none is possible."""
    settings = checkpoints.quantization(hf_config)
    method = str(settings.get("quant_method", ""))
    on_gpu = device.type == "cuda"
    asked = config.quantization
    check_asked(config, method, on_gpu)
    if not method:
        return Packing("plain")
    reason = _must_be_plain(config, settings, method, on_gpu)
    if reason and method in ("bitsandbytes", "torchao") and asked != "unpack":
        if config.tensor_parallel_size > 1 or config.lora_modules:
            raise ConfigError(f"quantization: {config.model} is packed in {method}, which only its package reads, and "
                              f"{reason}: give a checkpoint in another format")  # fmt: skip
        return Packing("theirs", method, "only its own package reads it")
    if reason:
        return Packing("unpacked", method, reason)
    if not (missing := _packs_experts(method, hf_config) or why_not_theirs(settings, device)):
        return Packing("theirs", method, "transformers' own quantizer runs here")
    if asked == "int8":
        return Packing("ours", method, "linear layers multiply its int8: this CPU multiplies plain weights")
    return Packing("ours", method, f"each layer unpacks its weight when it computes: {missing}")


def check_asked(config: EngineConfig, method: str, on_gpu: bool) -> None:
    """Raise ConfigError if ``--quantization`` names a form that this checkpoint or device does not support."""
    asked = config.quantization
    if asked in (None, "unpack"):
        return
    if asked == "int4" and not on_gpu:
        raise ConfigError("quantization: int4 is torchao's, for a GPU: give --device cuda, or int8 for this CPU")
    if asked in ("int4", "int8"):
        if on_gpu and method:
            raise ConfigError(
                f"quantization: {asked} quantizes plain weights on a GPU, and {config.model} is packed in {method} "
                "already: leave it out"
            )
        if on_gpu and config.tensor_parallel_size > 1:
            raise ConfigError(f"quantization: ranks cut plain weights, so {asked} on a GPU needs a single rank")
    elif asked != method:
        found = f"packed in {method}" if method else "not packed"
        raise ConfigError(f"quantization: {config.model} is {found}, not in {asked}: leave it out")


def _must_be_plain(config: EngineConfig, settings: Mapping[str, Any], method: str, on_gpu: bool) -> str:
    """Return why weights must be unpacked while they are read; "" if they may stay packed."""
    asked = config.quantization
    if asked == "unpack":
        return "--quantization unpack was given"
    if config.tensor_parallel_size > 1:
        return "ranks cut plain weights"
    if config.lora_modules:
        return "an adapter is merged into plain weights"
    if config.load_format == "dummy":
        return "random weights are plain"
    if asked == "int8":
        return "" if checkpoints.publishes_int8(settings) else "int8 products make codes of plain weights"
    if not on_gpu and asked != method:
        return f"this CPU multiplies plain weights faster; --quantization {method} keeps them packed"
    return ""


def _packs_experts(method: str, hf_config: Any) -> str:
    """Return why a format's package cannot hold this model's experts; "" if it can, or if there are none."""
    config = hf_config.get_text_config()
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if method not in ("awq", "gptq") or not any(isinstance(count, int) and count > 1 for count in counts):
        return ""
    return f"gptqmodel replaces linear layers in {method}, and transformers stacks experts into others"


def fetch_kernels(method: str, device: torch.device) -> None:
    """Fetch the kernels that transformers needs for ``method``, so that a failure shows before loading."""
    if method == "fp8" and device.type == "cuda" and not lazy_load_kernel("finegrained-fp8"):
        raise FileNotFoundError("kernels finegrained-fp8 cannot be loaded")
    if method == "mxfp4":
        get_kernel("kernels-community/gpt-oss-triton-kernels", version=1)


def why_not_theirs(settings: Mapping[str, Any], device: torch.device) -> str:
    """Return why transformers' own quantizer cannot keep these weights packed on ``device``; "" if it can."""
    method = str(settings.get("quant_method", ""))
    if method == "compressed-tensors":
        return "compressed-tensors' own layers unpack all weights in their first forward"
    # Packages that a format's quantizer needs to keep weights packed and to compute with them
    needs = {"awq": ("gptqmodel",), "gptq": ("gptqmodel", "optimum")}
    needs |= {"fp8": ("kernels", "triton"), "mxfp4": ("kernels", "triton")}
    needed = ("accelerate", *needs.get(method, ()))
    if absent := [name for name in needed if find_spec(name) is None]:
        return f"its kernels need {' and '.join(absent)}: pip install {' '.join(absent)}"
    try:
        fetch_kernels(method, device)
    except Exception as error:  # the hub's client may raise anything without a network
        return f"transformers cannot fetch its kernels from the hub ({type(error).__name__})"
    try:
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
    except Exception as error:  # a package is missing, too old, or does not support this device
        return " ".join(str(error).split())[:160] or type(error).__name__
    if getattr(quantizer.quantization_config, "dequantize", False):
        return f"transformers has no {method} kernels for this device"
    return ""


def arguments(
    config: EngineConfig,
    hf_config: Any,
    packing: Packing,
    dtype: torch.dtype,
    device: torch.device,
    skeleton: Callable[[], torch.nn.Module],
) -> tuple[Packing, dict[str, Any], Any]:
    """Return (the weights' final form, arguments for ``from_pretrained``, the class whose ``from_pretrained`` to call).

    The form may change to unpacked if the model cannot keep its weights packed. ``skeleton``: makes the model without
    memory. The class is None if transformers' automatic class loads the model.
    """
    if packing.how == "theirs":
        return packing, {"device_map": {"": device}}, None
    if packing.how == "plain":
        if device.type == "cuda" and config.quantization in ("int4", "int8"):
            return packing, torchao_arguments(config.quantization, skeleton(), device), None
        return packing, _experts_arguments(config, hf_config, device), None
    packed = checkpoints.packed(config.model, config.revision, hf_config, dtype)
    if packed is None:
        raise ModelLoadError(f"cannot load {config.model!r}: weights in {packing.method} cannot be unpacked")
    model = skeleton()
    if packing.how == "ours":
        kept = optional("kept weights")
        places = kept.places_in(packed, model)
        reason = kept.why_not_kept(packed, places)
        if config.quantization == "int8" and places.experts:
            reason = reason or "experts' int8 products make codes of plain weights"
        if reason:
            packing = Packing("unpacked", packing.method, f"{reason}; {packing.why.partition(': ')[2]}")
    if packing.how == "ours":
        state = kept.kept_weights(packed, places)
        return packing, {"state_dict": state, "quantization_config": kept.KeptConfig(packed, places)}, type(model)
    name = str(dtype).removeprefix("torch.")
    logger.warning(
        "%s: %d weights in %s are unpacked to %s: %s",
        config.model, len(packed.layouts), packing.method, name, packing.why,
    )  # fmt: skip
    return packing, {"state_dict": packed.weights()} | _experts_arguments(config, hf_config, device), type(model)


def _experts_arguments(config: EngineConfig, hf_config: Any, device: torch.device) -> dict[str, Any]:
    """Return arguments for ``from_pretrained`` that quantize experts while they are read, if int8 products use them."""
    if config.quantization != "int8" or device.type != "cpu" or config.lora:  # adapters are merged into plain weights
        return {}
    found: dict[str, Any] = optional("integer products").loading_arguments(hf_config)
    return found


def skeleton(loads: Any, hf_config: Any, named: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model that the class ``loads`` makes for ``hf_config``, with tensors that take no memory."""
    with torch.device("meta"):
        model: torch.nn.Module = loads.from_config(hf_config, **named)
    return model


def unpacked(model: Any) -> Any:
    """Remove from ``model`` transformers' notes that it was quantized, so that it can be moved and saved; return it."""
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer = None
        model.is_quantized = False
        model.quantization_method = None
        del model.config.quantization_config
    return model


def say_kept(model: torch.nn.Module, name: str, packing: Packing) -> None:
    """Log that weights stay packed, with their bytes and the reason. This is a warning only so that users see it."""
    logger.warning(
        "%s: weights in %s stay packed, %.4g GB: %s", name, packing.method, weight_bytes(model) / 1e9, packing.why
    )


def torchao_config(kind: str, model: torch.nn.Module, device: torch.device) -> Any:
    """Return torchao's configuration for ``kind``, int4 or int8. Raise ConfigError if it does not fit the model."""
    if find_spec("torchao") is None:
        raise ConfigError(f"quantization: {kind} on a GPU needs torchao: pip install 'fastdecode[packed]'")
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if kind == "int8":
        return Int8WeightOnlyConfig(version=2)
    widths = {each.in_features for name, each in model.named_modules() if is_quantized(name, each)}
    size = next((size for size in (128, 64, 32) if all(width % size == 0 for width in widths)), 0)
    if not size:
        raise ConfigError("quantization: int4 needs layers whose rows are multiples of 32: give int8")
    packing = "tile_packed_to_4d" if device.type == "cuda" else "plain"
    return Int4WeightOnlyConfig(group_size=size, int4_packing_format=packing)


def torchao_arguments(kind: str, model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """Return arguments that make ``from_pretrained`` quantize each weight while it is read."""
    from transformers import TorchAoConfig

    dense = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    left = [name for name in dense if not is_quantized(name, model.get_submodule(name))]
    made = TorchAoConfig(torchao_config(kind, model, device), modules_to_not_convert=left)
    return {"quantization_config": made, "device_map": {"": device}}


def quantize_dummy(model: torch.nn.Module, kind: str, device: torch.device) -> None:
    """Quantize a model's random weights in place, as ``torchao_arguments`` does with weights from files."""
    made = torchao_config(kind, model, device)
    from torchao.quantization import quantize_

    quantize_(model, made, filter_fn=lambda module, name: is_quantized(name, module))


def is_quantized(name: str, module: Any) -> bool:
    """Return whether ``--quantization`` on a GPU quantizes layer ``module``, called ``name`` in the model."""
    # Parts of names of layers that ``--quantization`` leaves as they are: LM heads, routers, and layers whose weights
    # R-workers multiply with
    left_dense = ("lm_head", "router", "indexer", "kv_b_proj")
    return type(module) is torch.nn.Linear and not any(part in name for part in left_dense)
