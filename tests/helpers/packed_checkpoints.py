"""Tiny checkpoints with weights packed in plain loops, and the same weights saved plain."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers import model_zoo
from helpers.tiny_configs import tiny_config

Tensors = dict[str, torch.Tensor]
GROUP = 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack columns of integers into words, in plain loops over the places in a word."""
    each = 32 // bits
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for column, place in enumerate(order or range(each)):
        packed |= numbers[:, column::each].long() << (bits * place)
    return packed.to(torch.int32) if packed.max() < 2**31 else (packed - ((packed >> 31) << 32)).to(torch.int32)


def drawn(rows: int, groups: int, most: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales that are exact in bfloat16, and zero points from 1 to ``most`` - 1."""
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.randint(1, 64, (rows, groups), generator=generator) / 512).bfloat16().float()
    return scales, torch.randint(1, most, (rows, groups), generator=generator)


def quantized(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [out, in], scales and zeros [out, groups], and the weight that they represent."""
    scales, zeros = drawn(weight.shape[0], weight.shape[1] // GROUP, 2**bits, weight.numel())
    wide_scales, wide_zeros = (each.repeat_interleave(GROUP, 1) for each in (scales, zeros))
    numbers = (weight / wide_scales + wide_zeros).round().clamp(0, 2**bits - 1).long()
    return numbers, scales, zeros, (numbers - wide_zeros) * wide_scales


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, zeros, plain = quantized(weight, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's packer puts column order[i] at place i
    place = tuple(order.index(column) for column in range(8))
    stem = name.removesuffix("weight")
    packed = {
        "qweight": words(numbers.T, 4, place),
        "qzeros": words(zeros.T, 4, place),
        "scales": scales.T.contiguous(),
    }
    return {stem + leaf: each for leaf, each in packed.items()}, plain


def gptq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Pack as GPTQ does, with the groups of columns in another order, as `desc_act` makes them."""
    numbers, scales, zeros, plain = quantized(weight, 4)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    stem = name.removesuffix("weight")
    packed = {
        "qweight": words(numbers[:, order], 4).T.contiguous(),
        "qzeros": words((zeros - 1).T, 4),
        "scales": scales.T.contiguous(),
        "g_idx": (order // GROUP).int(),
    }
    return {stem + leaf: each for leaf, each in packed.items()}, plain[:, order]


def int4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, zeros, plain = quantized(weight, 4)
    packed = {"_packed": words(numbers, 4), "_scale": scales, "_shape": torch.tensor(weight.shape)}
    return {name + leaf: each for leaf, each in packed.items()} | {
        name + "_zero_point": words(zeros.T, 4).T.contiguous()
    }, plain


def int8(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    return {name: numbers, name + "_scale": scales}, numbers.float() * scales


def fp8(name: str, weight: torch.Tensor, block: tuple[int, int] = (24, 40)) -> tuple[Tensors, torch.Tensor]:
    """Pack as FP8 in blocks [out, in], which need not divide the sizes."""
    high, wide = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scales, _ = drawn(high, wide, 4, weight.numel())
    spread = scales.repeat_interleave(block[0], 0)[: weight.shape[0]]
    spread = spread.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {name: numbers, name + "_scale_inv": scales}, numbers.float() * spread


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Pack experts' weights [experts, in, out] as MXFP4 along in: [experts, out, in / 32, 16]."""
    turned = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    powers = torch.full(turned.shape[:-1], 125, dtype=torch.uint8)
    numbers = (turned[..., None] * 4 - FP4).abs().argmin(-1)
    blocks = (numbers[..., ::2] | numbers[..., 1::2] << 4).to(torch.uint8)
    plain = (FP4[numbers] / 4).flatten(-2).transpose(1, 2).contiguous()
    return {f"{name}_blocks": blocks, f"{name}_scales": powers}, plain


Format = tuple[str, Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]
FORMATS: dict[str, Format] = {
    "fp8": ("deepseek_v3", fp8, {"quant_method": "fp8", "weight_block_size": [24, 40]}),
    "mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "awq": ("qwen2", awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": ("qwen2", gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "int4": (
        "qwen2",
        int4,
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
    ),
    "int8": ("qwen2", int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}
EVEN_FP8: Format = ("deepseek_v3", partial(fp8, block=(8, 8)), {"quant_method": "fp8", "weight_block_size": [8, 8]})
"""FP8 with blocks that divide the sizes, since transformers unpacks no others."""


def saved(kind: str, folder: Path, model_type: str = "", form: Format | None = None) -> tuple[Path, Path]:
    """Save a tiny model packed, and the same weights plain; return both folders."""
    own_type, pack, settings = form or FORMATS[kind]
    config = tiny_config(model_type or own_type)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain, packed = folder / "plain", folder / "packed"
    model_zoo.randomised(model, 0.15).save_pretrained(plain)
    tensors, parts, rest = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if _is_packed(kind, name, tensor):
            made, tensors[name] = pack(name, tensor)
            parts |= made
        else:
            rest[name] = tensor
    assert len(parts) > 8
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    packed.mkdir()
    index = {}
    for number, part in enumerate((parts, rest)):
        file = f"model-{number}.safetensors"
        save_file(part, packed / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index, "metadata": {}}))
    settings_file = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (packed / "config.json").write_text(json.dumps(settings_file))
    return plain, packed


def _is_packed(kind: str, name: str, tensor: torch.Tensor) -> bool:
    if kind == "mxfp4":
        return name.endswith(("gate_up_proj", "down_proj"))
    return (
        name.endswith(("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
        and tensor.ndim == 2
        and (kind == "fp8" or tensor.shape[1] % GROUP == 0)
    )
