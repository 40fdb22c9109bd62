"""Makes packed checkpoints in published forms (W8A8, W4A16, AWQ, GPTQ) from a plain one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight columns in a word of AWQ."""


def words(numbers: torch.Tensor, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack integers [rows, columns] of 4 bits, eight columns to an int32."""
    shifts = torch.tensor(places) * 4
    packed = (numbers.long().unflatten(1, (-1, 8)) << shifts).sum(-1)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


def in_four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers from 0 to 15 around 8, [out, in], and their scales [out, groups]."""
    scales = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7
    numbers = (weight / scales.repeat_interleave(GROUP, 1)).round().clamp(-8, 7) + 8
    return numbers.long(), scales


def w8a8(stem: str, weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {stem + "weight": (weight / scales).round().to(torch.int8), stem + "weight_scale": scales.bfloat16()}


def w4a16(stem: str, weight: torch.Tensor) -> Tensors:
    numbers, scales = in_four_bits(weight)
    shape = torch.tensor(weight.shape)
    return {
        stem + "weight_packed": words(numbers),
        stem + "weight_scale": scales.bfloat16(),
        stem + "weight_shape": shape,
    }


def awq(stem: str, weight: torch.Tensor) -> Tensors:
    numbers, scales = in_four_bits(weight)
    zeros = torch.full(scales.shape, 8).T
    found = {"qweight": words(numbers.T, AWQ_PLACES), "qzeros": words(zeros, AWQ_PLACES)}
    return {stem + name: each for name, each in (found | {"scales": scales.T.contiguous().half()}).items()}


def gptq(stem: str, weight: torch.Tensor) -> Tensors:
    numbers, scales = in_four_bits(weight)
    zeros = torch.full(scales.shape, 7).T
    found = {"qweight": words(numbers).T.contiguous(), "qzeros": words(zeros)}
    found |= {"scales": scales.T.contiguous().half(), "g_idx": (torch.arange(weight.shape[1]) // GROUP).int()}
    return {stem + name: each for name, each in found.items()}


def _compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    common = {"type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False} | weights,
        "input_activations": activations and common | activations,
    }
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": group}}  # fmt: skip


FORMATS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "w8a8": (
        w8a8,
        _compressed("int-quantized", {"num_bits": 8, "strategy": "channel"},
                    {"num_bits": 8, "strategy": "token", "dynamic": True}),
    ),
    "w4a16": (
        w4a16, _compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None)
    ),
    "awq": (
        awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
    "gptq": (
        gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
}  # fmt: skip


def pack(plain: Path, kind: str, folder: Path) -> Path:
    """Write ``plain``, a folder with one weights file, as a checkpoint of ``kind``."""
    make, settings = FORMATS[kind]
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    packed: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_linear = name.endswith("proj.weight") and tensor.ndim == 2
        packed |= make(name.removesuffix("weight"), tensor.float()) if is_linear else {name: tensor}
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}), encoding="utf-8")
    return folder
