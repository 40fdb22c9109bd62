"""Reads published checkpoints with weights in FP8, MXFP4, AWQ, GPTQ or compressed-tensors.

Weights are unpacked one by one, when transformers requests a tensor: it is read, multiplied by its scales and rounded
to the model's dtype. So only a few tensors are in memory beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from fastdecode.core.errors import ModelLoadError
from fastdecode.core.machine import return_free_memory
from fastdecode.sworker.model.formats import Layout, Layouts, check

MAPPED_BYTES = 1 << 25
"""Bytes read from a file before it is closed and opened again, which frees the pages that were read."""


Codes = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""A function that reads a weight: returns its int8 codes and the scale of each output."""


@dataclass(frozen=True)
class Weight:
    """A weight in a checkpoint's files that is not read yet.

    ``weight[...]`` reads and unpacks it; transformers requests tensors in this way.
    """

    read: Callable[[], torch.Tensor]

    def __getitem__(self, _: Any) -> torch.Tensor:
        """Read, unpack and return the whole weight; transformers never requests a part."""
        return self.read()


class Files:
    """The tensors of safetensors files. One file at a time is mapped, and mapped again after ``MAPPED_BYTES`` bytes."""

    def __init__(self, files: list[str]) -> None:
        self.places: dict[str, str] = {}
        for file in files:
            with safe_open(file, "pt") as handle:
                self.places |= dict.fromkeys(handle.keys(), file)
        self._file, self._num_bytes = "", 0
        self._handle: Any = None
        self._lock = Lock()  # transformers may read from several threads

    def read(self, name: str) -> torch.Tensor:
        """Return tensor ``name``, mapped from its file. Its pages stay until all tensors of the mapping are freed."""
        file = self.places[name]
        with self._lock:
            if file != self._file or self._num_bytes > MAPPED_BYTES:
                self._handle, self._file, self._num_bytes = safe_open(file, "pt"), file, 0
                return_free_memory()
            tensor: torch.Tensor = self._handle.get_tensor(name)
            self._num_bytes += tensor.nbytes
        return tensor


class Packed:
    """The tensors of a packed checkpoint's files, and the weights that can be unpacked from them."""

    def __init__(self, files: list[str], settings: Mapping[str, Any], dtype: torch.dtype) -> None:
        """``settings``: the checkpoint's ``quantization_config``. ``dtype``: dtype of the unpacked weights."""
        self.files = Files(files)
        self._layouts = Layouts(self.files.places, settings)
        self._dtype = dtype

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each packed weight, by the weight's name in an unpacked checkpoint."""
        found = dict(pair for name in self.files.places if (pair := self._layouts.of(name)))
        return {name: self._with_groups_that_count(layout) for name, layout in found.items()}

    def weights(self) -> dict[str, Weight]:
        """Return every weight, to be unpacked when it is read, by its name in an unpacked checkpoint."""
        return {name: Weight(partial(self._made, name)) for name in self.layouts} | self.plain()

    def plain(self) -> dict[str, Weight]:
        """Return the tensors that are not packed, by name."""
        chief = {name for layout in self.layouts.values() for name in layout.names.values()}
        names = [name for name in self.files.places if name not in chief and not self._layouts.belongs(name)]
        return {name: Weight(partial(self.copied, name)) for name in names}

    def copied(self, name: str) -> torch.Tensor:
        return self.files.read(name).clone()

    def _with_groups_that_count(self, layout: Layout) -> Layout:
        """Return ``layout``, without ``g_idx`` if that is negative: a group is then a run of neighbouring columns."""
        groups = [leaf for leaf in layout.names if leaf.endswith("g_idx")]
        absent = {leaf for leaf in groups if bool((self.files.read(layout.names[leaf]) < 0).any())}
        return replace(layout, names={leaf: name for leaf, name in layout.names.items() if leaf not in absent})

    def _made(self, name: str) -> torch.Tensor:
        layout = self.layouts[name]
        return layout.unpack({leaf: self.files.read(each) for leaf, each in layout.names.items()}, self._dtype)


def quantization(hf_config: Any) -> dict[str, Any]:
    """Return the configuration's ``quantization_config`` as a dictionary; {} for plain weights."""
    for config in (hf_config, hf_config.get_text_config()):
        if found := vars(config).get("quantization_config"):
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return {}


def packed(model: str, revision: str | None, hf_config: Any, dtype: torch.dtype) -> Packed | None:
    """Return the tensors of a packed checkpoint, None for any other. Raise ModelLoadError for an unknown layout.

    This removes the quantization from ``hf_config``, so that transformers makes a plain model.
    """
    settings = quantization(hf_config)
    # The ``quant_method`` of checkpoints that this module unpacks
    methods = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
    if settings.get("quant_method") not in methods:
        return None
    check(settings)
    found = Packed(packed_files(model, revision), settings, dtype)
    for config in (hf_config, hf_config.get_text_config()):
        vars(config).pop("quantization_config", None)
    return found


def published_codes(model: str, revision: str | None, settings: Mapping[str, Any]) -> dict[str, Codes]:
    """Return readers of the int8 weights of a W8A8 checkpoint, by name; {} for a checkpoint of any other kind.

    ``settings``: the ``quantization_config``. A reader returns int8 [outputs, inputs] and float32 scales [outputs].
    """
    if not publishes_int8(settings):
        return {}
    files = Files(packed_files(model, revision))
    names = [name for name in files.places if f"{name}_scale" in files.places]
    return {name: partial(_codes, files, name) for name in names if f"{name}_zero_point" not in files.places}


def publishes_int8(settings: Mapping[str, Any]) -> bool:
    """Return whether ``settings``, a ``quantization_config``, are those of a W8A8 checkpoint."""
    groups = list((settings.get("config_groups") or {}).values())
    return settings.get("quant_method") == "compressed-tensors" and bool(groups) and all(map(_is_w8a8, groups))


def _is_w8a8(group: Mapping[str, Any]) -> bool:
    """Return whether weights are int8 with a scale per output, and activations int8 with a dynamic scale per row."""
    weights, rows = group.get("weights") or {}, group.get("input_activations") or {}
    int8 = all(
        each.get("num_bits") == 8 and each.get("type") == "int" and each.get("symmetric") for each in (weights, rows)
    )
    return int8 and weights.get("strategy") == "channel" and rows.get("strategy") == "token" and bool(rows["dynamic"])


def _codes(files: Files, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return files.read(name).clone(), files.read(f"{name}_scale").float().reshape(-1)


def packed_files(model: str, revision: str | None) -> list[str]:
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
