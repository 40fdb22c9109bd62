"""Published checkpoints with weights in FP8, MXFP4, AWQ, GPTQ or compressed-tensors, unpacked while they are read.

transformers requests one tensor after another. Each is then read, multiplied by its scales and rounded to the model's
dtype. So beside the model, only a few tensors are in memory at a time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from fastdecode.core.errors import ModelLoadError
from fastdecode.core.machine import return_free_memory
from fastdecode.sworker.model import unpack

logger = logging.getLogger(__name__)

MAPPED_BYTES = 1 << 25
"""Bytes read from a file before it is opened again, which frees its pages and those of unpacking."""


Codes = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""A function that reads the int8 codes of a weight, and the scale of each output."""


@dataclass(frozen=True)
class Weight:
    """A weight that is not read yet.

    ``weight[...]`` reads and unpacks it, which is how transformers requests tensors.
    """

    read: Callable[[], torch.Tensor]

    def __getitem__(self, _: Any) -> torch.Tensor:
        """Return the whole tensor; transformers never requests a part."""
        return self.read()


class Files:
    """The tensors of safetensors files, mapped into memory one file at a time, and in parts."""

    def __init__(self, files: list[str]) -> None:
        """Record which file has which tensor."""
        self.places: dict[str, str] = {}
        for file in files:
            with safe_open(file, "pt") as handle:
                self.places |= dict.fromkeys(handle.keys(), file)
        self._file, self._num_bytes = "", 0
        self._handle: Any = None
        self._lock = Lock()  # transformers reads in threads if the user configures it

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor that is still in the file. Pages read from a file stay until all such tensors are gone."""
        file = self.places[name]
        with self._lock:
            if file != self._file or self._num_bytes > MAPPED_BYTES:
                self._handle, self._file, self._num_bytes = safe_open(file, "pt"), file, 0
                return_free_memory()
            tensor: torch.Tensor = self._handle.get_tensor(name)
            self._num_bytes += tensor.nbytes
        return tensor


class Packed:
    """A packed checkpoint: the tensors of its files, and how its weights are made from them."""

    def __init__(self, files: list[str], settings: Mapping[str, Any], dtype: torch.dtype) -> None:
        """``settings``: its ``quantization_config``. ``dtype``: of the unpacked weights."""
        self.num_unpacked = 0
        self._files = Files(files)
        self._places = self._files.places
        self._settings = settings
        self._dtype = dtype

    def weights(self) -> dict[str, Weight]:
        """Return every weight by its name in a plain checkpoint."""
        found: dict[str, Weight] = {}
        for name in self._places:
            stem, _, leaf = name.rpartition(".")
            if leaf == "qweight":
                found[f"{stem}.weight"] = self._made(self._awq if self._is("awq") else self._gptq, stem)
            elif leaf == "weight_packed":
                found[f"{stem}.weight"] = self._made(self._packed_rows, stem)
            elif name.endswith("_blocks") and f"{name[:-6]}scales" in self._places:
                found[name.removesuffix("_blocks")] = self._made(self._mxfp4, name.removesuffix("_blocks"))
            elif scale := next((name + each for each in ("_scale_inv", "_scale") if name + each in self._places), None):
                found[name] = self._made(self._scaled, name, scale)
            elif not self._belongs(name, stem):
                found[name] = Weight(partial(self._copied, name))
        return found

    def _is(self, method: str) -> bool:
        return self._settings.get("quant_method") == method

    def _made(self, make: Callable[..., torch.Tensor], *names: str) -> Weight:
        self.num_unpacked += 1
        return Weight(partial(make, *names))

    def _belongs(self, name: str, stem: str) -> bool:
        """Return whether a tensor is part of a packed weight, or a scale of activations or caches."""
        if any(f"{stem}.{leaf}" in self._places for leaf in ("qweight", "weight_packed")):
            return not name.endswith(".bias")
        ends = ("_scale_inv", "_scale", "_scales", "_zero_point", "_g_idx")
        return name.endswith(ends)

    def _copied(self, name: str) -> torch.Tensor:
        """Return a copy of a plain tensor, since the file's packed ones would stay in memory with it."""
        return self._read(name).clone()

    def _read(self, name: str) -> torch.Tensor:
        return self._files.read(name)

    def _read_all(self, stem: str, *leaves: str) -> list[Any]:
        names = [f"{stem}.{leaf}" for leaf in leaves]
        return [self._read(name) if name in self._places else None for name in names]

    def _awq(self, stem: str) -> torch.Tensor:
        words, zeros, scales = self._read_all(stem, "qweight", "qzeros", "scales")

        def part(begin: int, end: int) -> torch.Tensor:
            here = slice(begin // 8, end // 8)
            return unpack.awq(words[:, here], zeros[:, here], scales[:, begin:end])

        return unpack.in_parts((scales.shape[1], words.shape[0]), 32, self._dtype, part)

    def _gptq(self, stem: str) -> torch.Tensor:
        plus, bits = 0 if self._settings.get("checkpoint_format") == "gptq_v2" else 1, int(self._settings["bits"])
        words, zeros, scales, groups = self._read_all(stem, "qweight", "qzeros", "scales", "g_idx")

        def part(begin: int, end: int) -> torch.Tensor:
            here = slice(begin * bits // 32, end * bits // 32)
            return unpack.gptq(words[:, begin:end], zeros[:, here], scales[:, begin:end], groups, bits, plus)

        return unpack.in_parts((words.shape[1], words.shape[0] * 32 // bits), 32, self._dtype, part)

    def _packed_rows(self, stem: str) -> torch.Tensor:
        leaves = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        words, scales, shape, zeros, groups = self._read_all(stem, *leaves)
        (rows, columns), bits = shape.tolist(), _num_bits(self._settings)

        def part(begin: int, end: int) -> torch.Tensor:
            offsets = None if zeros is None else zeros[begin * bits // 32 : -(-end * bits // 32)]
            return unpack.packed_rows(words[begin:end], scales[begin:end], columns, offsets, groups, bits)

        return unpack.in_parts((rows, columns), 32, self._dtype, part)

    def _mxfp4(self, name: str) -> torch.Tensor:
        blocks, scales = self._read(f"{name}_blocks"), self._read(f"{name}_scales")
        rows = unpack.PART_ELEMENTS // (2 * blocks.shape[-1])
        made: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=self._dtype, rows_per_chunk=rows)
        return made

    def _scaled(self, name: str, scale: str) -> torch.Tensor:
        zero = f"{name}_zero_point"
        numbers, scales, zeros = self._read(name), self._read(scale), self._read(zero) if zero in self._places else None
        block = tuple(self._settings.get("weight_block_size") or ())
        return unpack.scaled(numbers, scales, zeros, block, self._dtype)


def _num_bits(settings: Mapping[str, Any]) -> int:
    """Return the bits of compressed-tensors' weights, which must be the same in all groups."""
    groups = (settings.get("config_groups") or {}).values()
    bits = {int(group["weights"]["num_bits"]) for group in groups if group.get("weights")}
    if len(bits) != 1 or not bits <= {4, 8}:
        raise ModelLoadError(f"compressed-tensors with weights of {sorted(bits)} bits: 4 or 8 for all are unpacked")
    return bits.pop()


def quantization(hf_config: Any) -> dict[str, Any]:
    """Return the configuration's ``quantization_config`` as a dictionary; {} for plain weights."""
    for config in (hf_config, hf_config.get_text_config()):
        if found := vars(config).get("quantization_config"):
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return {}


def unpacked(model: str, revision: str | None, hf_config: Any, dtype: torch.dtype) -> dict[str, Weight] | None:
    """Return the weights of a packed checkpoint, for ``from_pretrained``'s ``state_dict``; None for any other.

    ``hf_config`` is that of a plain model afterwards. Raise ModelLoadError for an unknown layout.
    """
    settings = quantization(hf_config)
    # Kinds of checkpoints that this module unpacks
    methods = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
    if settings.get("quant_method") not in methods:
        return None
    _check(settings)
    packed = Packed(_files(model, revision), settings, dtype)
    weights = packed.weights()
    for config in (hf_config, hf_config.get_text_config()):
        vars(config).pop("quantization_config", None)
    name = str(dtype).removeprefix("torch.")
    logger.warning(
        "%s: %d weights in %s are unpacked to %s", model, packed.num_unpacked, settings["quant_method"], name
    )
    return weights


def published_codes(model: str, revision: str | None, settings: Mapping[str, Any]) -> dict[str, Codes]:
    """Return readers of the int8 weights of a W8A8 checkpoint, by name; {} for a checkpoint of any other kind.

    ``settings``: its ``quantization_config``. A reader returns codes [outputs, inputs] and float32 scales [outputs].
    """
    groups = list((settings.get("config_groups") or {}).values())
    if settings.get("quant_method") != "compressed-tensors" or not groups or not all(map(_is_w8a8, groups)):
        return {}
    files = Files(_files(model, revision))
    names = [name for name in files.places if f"{name}_scale" in files.places]
    return {name: partial(_codes, files, name) for name in names if f"{name}_zero_point" not in files.places}


def _is_w8a8(group: Mapping[str, Any]) -> bool:
    """Return whether weights have a scale per output, and activations a dynamic scale per row."""
    weights, rows = group.get("weights") or {}, group.get("input_activations") or {}
    int8 = all(
        each.get("num_bits") == 8 and each.get("type") == "int" and each.get("symmetric") for each in (weights, rows)
    )
    return int8 and weights.get("strategy") == "channel" and rows.get("strategy") == "token" and bool(rows["dynamic"])


def _codes(files: Files, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return files.read(name).clone(), files.read(f"{name}_scale").float().reshape(-1)


def _check(settings: Mapping[str, Any]) -> None:
    """Refuse layouts that `unpack.py` would read wrongly."""
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


def _files(model: str, revision: str | None) -> list[str]:
    """Return the checkpoint's safetensors files, in a folder or fetched from the hub."""
    given = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(model, SAFE_WEIGHTS_INDEX_NAME, **given)
    names = [SAFE_WEIGHTS_NAME]
    if index:
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    files = [cached_file(model, name, **given) for name in names]
    if missing := [name for name, file in zip(names, files, strict=True) if file is None]:
        raise ModelLoadError(f"cannot load {model!r}: {missing[0]} is missing")
    return [str(file) for file in files]
