"""Layouts of packed weights: which tensors make up one weight, and the function that unpacks them.

The functions take tensors on any device. So a layer that stays packed can unpack its weight on the device on which it
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.model import unpack

Tensors = Mapping[str, torch.Tensor]
"""The stored tensors that together encode one packed weight, by their names within the layer."""

Unpack = Callable[[Tensors, torch.dtype], torch.Tensor]
"""A function that unpacks a weight: it takes the stored tensors and a dtype, and returns the weight."""


@dataclass(frozen=True)
class Layout:
    """One packed weight: its unpacking function, and its tensors' names in the files by their names in the layer.

    ``axis``: the dimension of the tensors along which the weight's outputs lie; None if ``unpack`` takes stacked
    experts. ``unit``: number of outputs that share one entry in this dimension.
    """

    unpack: Unpack
    names: dict[str, str]
    axis: int | None = 0
    unit: int = 1

    @property
    def is_linear(self) -> bool:
        """True if the weight belongs to one linear layer; False if it has several experts."""
        return "blocks" not in self.names

    def joins(self, num_outputs: int) -> bool:
        """Return whether weights in this layout, with ``num_outputs`` each, stay valid when joined along ``axis``."""
        return num_outputs % self.unit == 0 and not any(leaf.endswith("g_idx") for leaf in self.names)


class Layouts:
    """Finds the layout of each packed weight among a checkpoint's tensors."""

    def __init__(self, places: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        """``places``: the file of each tensor, by name. ``settings``: the checkpoint's ``quantization_config``."""
        self._places, self._settings = places, settings

    def of(self, name: str) -> tuple[str, Layout] | None:
        """Return (name, layout) of the packed weight whose main tensor is ``name``; None for any other tensor."""
        stem, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            return f"{stem}.weight", self._qweight(stem)
        if leaf == "weight_packed":
            return f"{stem}.weight", self._packed_rows(stem)
        if name.endswith("_blocks") and f"{name[:-6]}scales" in self._places:
            plain = name.removesuffix("_blocks")
            return plain, Layout(mxfp4, {"blocks": name, "scales": f"{plain}_scales"}, axis=None)
        scale = next((name + each for each in ("_scale_inv", "_scale") if name + each in self._places), None)
        if scale is None:
            return None
        zero = f"{name}_zero_point"
        names = {"codes": name, "scales": scale} | ({"zeros": zero} if zero in self._places else {})
        block = block_of(self._settings)
        return name, Layout(partial(scaled, block=block), names, unit=block[0] if block else 1)

    def belongs(self, name: str) -> bool:
        """Return whether tensor ``name`` is a part of a packed weight, or a scale for activations or KV cache."""
        stem = name.rpartition(".")[0]
        if any(f"{stem}.{leaf}" in self._places for leaf in ("qweight", "weight_packed")):
            return not name.endswith(".bias")
        return name.endswith(("_scale_inv", "_scale", "_scales", "_zero_point", "_g_idx"))

    def _names(self, stem: str, leaves: tuple[str, ...]) -> dict[str, str]:
        return {leaf: name for leaf in leaves if (name := f"{stem}.{leaf}") in self._places}

    def _qweight(self, stem: str) -> Layout:
        names = self._names(stem, ("qweight", "qzeros", "scales", "g_idx"))
        if self._settings.get("quant_method") == "awq":
            return Layout(awq, names, axis=1, unit=8)
        plus, bits = 0 if self._settings.get("checkpoint_format") == "gptq_v2" else 1, int(self._settings["bits"])
        return Layout(partial(gptq, bits=bits, plus=plus), names, axis=1, unit=32 // bits)

    def _packed_rows(self, stem: str) -> Layout:
        bits = num_bits(self._settings)
        leaves = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        return Layout(partial(packed_rows, bits=bits), self._names(stem, leaves), unit=32 // bits)


def awq(tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight that ``tensors`` encode in AWQ's "gemm" layout."""
    words, zeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))

    def part(begin: int, end: int) -> torch.Tensor:
        here = slice(begin // 8, end // 8)
        return unpack.awq(words[:, here], zeros[:, here], scales[:, begin:end])

    return unpack.in_parts((scales.shape[1], words.shape[0]), 32, dtype, part, words.device)


def gptq(tensors: Tensors, dtype: torch.dtype, bits: int, plus: int) -> torch.Tensor:
    """Return the weight that ``tensors`` encode in GPTQ's layout. ``plus``: 1 if files store zero points minus 1."""
    words, zeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))

    def part(begin: int, end: int) -> torch.Tensor:
        here = slice(begin * bits // 32, end * bits // 32)
        return unpack.gptq(words[:, begin:end], zeros[:, here], scales[:, begin:end], tensors.get("g_idx"), bits, plus)

    return unpack.in_parts((words.shape[1], words.shape[0] * 32 // bits), 32, dtype, part, words.device)


def packed_rows(tensors: Tensors, dtype: torch.dtype, bits: int) -> torch.Tensor:
    """Return the weight that ``tensors`` encode in compressed-tensors' "pack-quantized" layout."""
    words, scales, zeros = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    rows, columns = tensors["weight_shape"].tolist()

    def part(begin: int, end: int) -> torch.Tensor:
        offsets = None if zeros is None else zeros[begin * bits // 32 : -(-end * bits // 32)]
        groups = tensors.get("weight_g_idx")
        return unpack.packed_rows(words[begin:end], scales[begin:end], columns, offsets, groups, bits)

    return unpack.in_parts((rows, columns), 32, dtype, part, words.device)


def scaled(tensors: Tensors, dtype: torch.dtype, block: tuple[int, ...]) -> torch.Tensor:
    """Return the weight that ``tensors`` encode as FP8 or int8 numbers and scales."""
    return unpack.scaled(tensors["codes"], tensors["scales"], tensors.get("zeros"), block, dtype)


def mxfp4(tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of all experts of a layer, which ``tensors`` encode as MXFP4 blocks."""
    blocks = tensors["blocks"]
    rows = unpack.part_elements(blocks.device) // (2 * blocks.shape[-1])
    made: torch.Tensor = convert_moe_packed_tensors(blocks, tensors["scales"], dtype=dtype, rows_per_chunk=rows)
    return made


def num_bits(settings: Mapping[str, Any]) -> int:
    """Return the bits per weight of a compressed-tensors checkpoint; all its groups must have the same number."""
    groups = (settings.get("config_groups") or {}).values()
    bits = {int(group["weights"]["num_bits"]) for group in groups if group.get("weights")}
    if len(bits) != 1 or not bits <= {4, 8}:
        raise ModelLoadError(f"compressed-tensors with weights of {sorted(bits)} bits: all must have 4, or all 8")
    return bits.pop()


def block_of(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return (outputs, inputs) of the block that shares one scale; () if scales are per weight, output or group."""
    groups = (settings.get("config_groups") or {}).values()
    given = {tuple(group["weights"].get("block_structure") or ()) for group in groups if group.get("weights")}
    blocks = {tuple(settings.get("weight_block_size") or ())} | given
    if len(blocks - {()}) > 1:
        raise ModelLoadError(f"scales per block of {sorted(blocks - {()})}: all weights must have one size")
    return max(blocks)


def check(settings: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for layouts that the functions of `unpack.py` would read wrongly."""
    method = settings["quant_method"]
    known: dict[str, dict[str, tuple[Any, ...]]] = {
        "awq": {"bits": (4, None), "version": ("gemm", None)},
        "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2", "", None)},
        "compressed-tensors": {"format": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")},
    }
    for name, values in known.get(method, {}).items():
        if (found := settings.get(name)) not in values:
            usual = ", ".join(str(value) for value in values if value)
            raise ModelLoadError(f"{method} weights with {name} {found!r} are not unpacked; {usual} are")
