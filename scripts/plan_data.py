"""Makes docs/assets/planner.js for the calculator page: sizes of models, presets, and constants of the equations.

The page has the equations themselves in JavaScript; tests/test_calculator.py compares both for random machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.equations import TILE_TOKENS
from fastdecode.perfmodel.hardware import (
    CPU_READ_EFFICIENCY,
    FLOPS_EFFICIENCY,
    GPU_READ_EFFICIENCY,
    GROUP_SIZES,
    CpuHost,
    Gpu,
    kernel_bytes_per_second,
    parse_link,
)
from fastdecode.perfmodel.lab.cli.machine_flags import DEFAULT_LINK
from fastdecode.perfmodel.lab.cli.shape_inputs import asked_shape, file_bits
from fastdecode.perfmodel.lab.gpu_only import held_bytes, usable_bytes
from fastdecode.perfmodel.machine_words import gpu_of
from fastdecode.perfmodel.model_config import find_shape
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.presets import CPU_HOSTS, GPUS
from fastdecode.perfmodel.rank_costs import (
    PCIE_STEP_SECONDS,
    PEER_EFFICIENCY,
    RankGroup,
    gpu_peer_link,
    rank_shape,
)
from fastdecode.perfmodel.service import CHUNK_TOKENS

RANKS = (1, 2, 4, 8, 16, 32, 64)


def is_plain(name: str) -> bool:
    """Return whether the page's equations cover the model: all layers attend to all tokens, with K and V in rows."""
    shape = find_shape(name)
    return not (shape.latent or shape.index or shape.state or any(shape.windows))


def data(models: tuple[str, ...], weights: tuple[str, ...], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return all figures: of the ``models`` that the page's equations cover, and of all presets."""
    usual = gpu_of("1GB/s:1TFLOPS:1GiB")
    plain = [model for model in models if is_plain(model)]
    return {
        "max_context": {model: find_shape(model).max_context for model in plain},
        "models": {model: {kind: dict(_sizes(model, kind, parser)) for kind in weights} for model in plain},
        "gpus": {name: _gpu(gpu) for name, gpu in GPUS.items()},
        "hosts": {name: _host(host) for name, host in CPU_HOSTS.items()},
        "kernel_rates": {
            dtype: [kernel_bytes_per_second(dtype, group, 1) / 1e9 for group in GROUP_SIZES]
            for dtype in ("float16", "bfloat16", "float32")
        },
        "group_sizes": GROUP_SIZES,
        "memory_fraction": usable_bytes(usual) / usual.memory_bytes,
        "link": parse_link(DEFAULT_LINK),
        "tile_tokens": TILE_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "usual_pcie": usual.host_bytes_per_second,
        "gpu_read_efficiency": GPU_READ_EFFICIENCY,
        "cpu_read_efficiency": CPU_READ_EFFICIENCY,
        "flops_efficiency": FLOPS_EFFICIENCY,
        "peer_efficiency": PEER_EFFICIENCY,
        "pcie_step_seconds": PCIE_STEP_SECONDS,
    }


def script(models: tuple[str, ...], weights: tuple[str, ...], parser: argparse.ArgumentParser) -> str:
    """Return the script that defines the figures for the page."""
    return f"window.planData = {json.dumps(data(models, weights, parser), separators=(',', ':'))};\n"


def _sizes(model: str, kind: str, parser: argparse.ArgumentParser) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each number of ranks that can share the model, with the sizes of one rank's part."""
    for count in RANKS:
        words = ["plan", "--model", model, "--tensor-parallel-size", str(count)]
        args = parser.parse_args([*words, *(() if kind == "plain" else ("--weights", kind))])
        try:
            yield count, _rank_sizes(asked_shape(args), file_bits(args), count)
        except PlanError:
            continue


def _rank_sizes(shape: ModelShape, bits: float, count: int) -> dict[str, Any]:
    rank, alone = rank_shape(shape, count), replace(shape, weight_bits=bits)
    group, layer = RankGroup(count, gpu_peer_link(gpu_of("1GB/s:1TFLOPS:1GiB"))), rank.layer_layout
    return {
        "dtype": shape.dtype,
        "item_bytes": shape.item_bytes,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "layer_bytes": rank.layer_parameters * rank.layer_item_bytes,
        "active_layer_parameters": rank.active_layer_parameters,
        "head_parameters": rank.head_parameters,
        "attending_row_bytes": rank.attending_row_bytes,
        "appending_row_bytes": rank.appending_row_bytes,
        "token_bytes": layer.token_bytes(shape.dtype),
        "products": layer.multiply_adds() / layer.kv_elements,
        "kv_bytes": rank.kv_bytes_per_token(shape.dtype),
        "held_bytes": held_bytes(shape, group),
        "pair_operations": 2.0 * shape.num_heads * 2 * shape.head_dim * shape.attention_layers,
        "active_parameters": shape.active_parameters,
        "alone_kv_bytes": shape.kv_bytes_per_token(shape.dtype),
        "alone_weight_bytes": alone.weight_bytes,
        "alone_held_bytes": held_bytes(alone, group),
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    link = gpu_peer_link(gpu)
    return {
        "flops": gpu.flops_per_second.achieved,
        "weights": gpu.weight_bytes_per_second.achieved,
        "kv": gpu.kv_bytes_per_second.achieved,
        "memory": gpu.memory_bytes,
        "pcie": gpu.host_bytes_per_second,
        "peer_rate": link.bytes_per_second.achieved,
        "peer_step": link.step_seconds,
        "price": gpu.price.per_hour if gpu.price else None,
    }


def _host(host: CpuHost) -> dict[str, Any]:
    return {
        "read": host.read_bytes_per_second.achieved,
        "cores": host.cores,
        "memory": host.memory_bytes,
        "r_workers": host.r_workers_per_host,
        "holds_gpu": host.holds_gpu,
        "price": host.price.per_hour if host.price else (0 if host.holds_gpu else None),
    }
