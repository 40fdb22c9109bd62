"""The model that flags of ``plan`` and ``simulate`` name, and the sizes that follow from its weight format."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.deployment import check_alike
from fastdecode.perfmodel.model_config import find_shape
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.model_sizes import FORMATS, KEPT_PACKED
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.sizing import Workload


def named_shape(name: str) -> ModelShape:
    """Return the shape from ``find_shape``, or of a GGUF file, which needs transformers."""
    if Path(name).suffix != ".gguf":
        return find_shape(name)
    from fastdecode.sworker.model.shape import model_shape

    return model_shape(EngineConfig(model=name))


def asked_shape(args: argparse.Namespace) -> ModelShape:
    """Return the shape of ``--model``, with the weight format that the flags give.

    The flags also set the dtype of states, where states are, and whether R-workers multiply latents with K and V.
    """
    dtype = args.mamba_ssm_cache_dtype
    shape = replace(named_shape(args.model), weight_bits=_kept_bits(args), multiplies_int8=bool(args.quantization))
    shape = shape.with_state_dtype("float32" if dtype == "auto" else dtype)
    if args.latent_absorption == "r" and not shape.latent:
        raise ConfigError(f"latent_absorption: r needs latent attention (MLA), and {shape.name} has none")
    if args.state_on == "s" and not shape.state:
        raise ConfigError(f"state_on: s needs recurrent layers, and {shape.name} has none")
    return shape.absorbing(args.latent_absorption == "r").keeping_states(args.state_on == "s")


def file_bits(args: argparse.Namespace) -> float:
    """Return the bits per weight of a layer in the checkpoint; 0 if weights have the model's dtype."""
    if args.quantization:
        return FORMATS[args.quantization]
    if args.weights:
        return FORMATS[args.weights]
    return named_shape(args.model).weight_bits if args.model else 0.0


def _kept_bits(args: argparse.Namespace) -> float:
    """Return the bits per weight of a layer in the S-worker's memory; 0 if unpacked, as always with several ranks."""
    if args.quantization:
        return file_bits(args)
    kept = args.weights in KEPT_PACKED if args.weights else Path(args.model).suffix != ".gguf"
    return file_bits(args) if kept and getattr(args, "tensor_parallel_size", 1) in (None, 1) else 0.0


def weight_lines(args: argparse.Namespace, shape: ModelShape) -> tuple[str, ...]:
    """Return printed lines about the weights: their format, and the memory that they take packed or unpacked."""
    bits = file_bits(args)
    if not bits:
        return ()
    if shape.multiplies_int8:
        return (f"linear layers multiply int8 (--quantization int8), {shape.weight_bytes / 1e9:.4g} GB of weights",)
    packed = replace(shape, weight_bits=bits)
    name = args.weights or f"{bits:.3g} bits each"
    if shape.weight_bits:
        return (f"weights in {name}: they stay packed on the GPU, {shape.weight_bytes / 1e9:.4g} GB",)
    return (
        f"weights in {name}: the S-worker unpacks them to {shape.dtype}, {shape.weight_bytes / 1e9:.4g} GB; the GPU "
        f"alone keeps them packed, {packed.weight_bytes / 1e9:.4g} GB",
    )


def check_state_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for ``--state-memory`` if R-workers keep the states."""
    if args.state_memory and args.state_on == "r":
        raise ConfigError("state_memory is for states on the S-worker (state_on s); leave it out")


def profiled_shape(args: argparse.Namespace, profile: HardwareProfile) -> ModelShape:
    """Return the profile's model, or the requested one if only its layer count and KV heads differ."""
    shape = asked_shape(args) if args.model else profile.shape
    if args.quantization:
        shape = replace(shape, multiplies_int8=True)
    check_alike(profile, shape)
    return shape


def gpu_kv_bytes(shape: ModelShape, kv_dtype: str, read_share: float) -> tuple[float, float]:
    """Return the bytes per token that GPUs without R-workers hold, and the fraction of these that a step reads.

    The GPUs free tokens outside all windows. They keep tokens that an index did not pick, which a later step may pick.
    """
    held = shape.kv_bytes_per_token(kv_dtype)
    return (held, read_share) if shape.index else (read_share * held, 1.0)


def mean_row_bytes(shape: ModelShape, workload: Workload) -> float:
    """Return the mean bytes that a row sends and receives per layer.

    Prompt rows attend on the S-worker and send only k and v. In models with recurrent layers they attend on R-workers.
    """
    if shape.state:
        return shape.attending_row_bytes
    of_prompt = 1.0 - 1.0 / workload.rows_per_output_token
    return shape.attending_row_bytes * (1.0 - of_prompt) + shape.appending_row_bytes * of_prompt


def kv_dtype_of(args: argparse.Namespace, shape: ModelShape) -> str:
    return shape.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
