"""Checks of a checkpoint's files: each is complete before loading, and every tensor was used afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from fastdecode.core.errors import ModelLoadError

logger = logging.getLogger(__name__)

GGUF_NEEDS = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""

ADAPTER_FILE = "adapter_config.json"
"""The file that marks a LoRA adapter's folder, in peft's format."""


def weights_place(model: str) -> tuple[str, dict[str, str]]:
    """Return the arguments of ``from_pretrained`` for ``model``: a path or hub id, or PATH.gguf's folder and file.

    Raise ModelLoadError if there is no such file, or if a package that reads GGUF is not installed.
    """
    path = Path(model)
    if path.suffix != ".gguf":
        return model, {}
    if not path.is_file():
        raise ModelLoadError(f"cannot load {model!r}: no such file")
    missing = [name for name in GGUF_NEEDS if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        raise ModelLoadError(f"cannot load {model!r}: GGUF files need {needs}: pip install 'fastdecode[gguf]'")
    return str(path.parent), {"gguf_file": path.name}


def check_no_adapter(folder: Path) -> None:
    """Raise ModelLoadError if ``folder`` holds a LoRA adapter: transformers would load the adapter's base model."""
    if not (folder / ADAPTER_FILE).is_file():
        return
    where = f"--model {adapter_config(folder).get('base_model_name_or_path') or 'BASE'} --lora-modules NAME={folder}"
    beside = " beside a model" if (folder / "config.json").exists() else ", without a model"
    raise ModelLoadError(
        f"cannot load {str(folder)!r}: it holds a LoRA adapter ({ADAPTER_FILE}){beside}: give {where}, or take the "
        "file away"
    )


def check_not_adapted(model: Any) -> None:
    """Raise ModelLoadError if ``model`` was loaded with a LoRA adapter, which transformers leaves unmerged."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelLoadError("the model is a LoRA adapter: give its base, and --lora-modules NAME=FOLDER")


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the adapter in ``folder``. Raise ModelLoadError if it is no JSON object."""
    try:
        found = json.loads((folder / ADAPTER_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder / ADAPTER_FILE}: not a readable JSON file: {error}") from None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{folder / ADAPTER_FILE}: must hold a JSON object")
    return found


def check_files(folder: Path) -> None:
    """Raise ModelLoadError if a file of ``folder``'s checkpoint is missing or damaged; the error names the file.

    A model of the hub has no folder here, and is not checked.
    """
    if not folder.is_dir():
        return
    index, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if whole.is_file():
        check_file(whole)
    elif index.is_file():
        for name in _named_files(index):
            if not (folder / name).is_file():
                raise ModelLoadError(f"cannot load {str(folder)!r}: {name} is missing, which {index.name} names")
            check_file(folder / name)


def check_file(file: Path) -> None:
    """Raise ModelLoadError, naming ``file``, unless it is a complete safetensors file."""
    where = f"cannot load {str(file.parent)!r}: {file.name}"
    # The beginning of a Git LFS pointer, which stands in for a large file
    lfs_pointer = b"version https://git-lfs.github.com/"
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(lfs_pointer))
        if begin == lfs_pointer:
            raise ModelLoadError(f"{where} is a pointer of Git LFS and has no weights: run git lfs pull there")
        with safe_open(file, "pt"):
            return
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{where} is no complete safetensors file: fetch it again ({reason})") from None


def check_tensors(model: str, info: dict[str, Any], fewer_layers: bool = False) -> None:
    """Raise ModelLoadError for a missing tensor or a wrong shape; log unused tensors in one line.

    ``info``: transformers' loading report. transformers fills missing tensors with random numbers. With
    ``fewer_layers`` the user asked for a part of the model, so unused tensors are expected.
    """
    for name, found, wanted in info["mismatched_keys"]:
        raise ModelLoadError(
            f"cannot load {model!r}: {name} has the shape {tuple(found)}, and config.json asks for {tuple(wanted)}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(f"cannot load {model!r}: {len(missing)} tensors are missing, {missing[0]} first")
    if not fewer_layers:
        name_unused(model, sorted(info["unexpected_keys"]))


def name_unused(model: str, names: Sequence[str]) -> None:
    """Warn in one line about tensors that no parameter uses."""
    # models compute these frequencies from the configuration
    named = [name for name in names if not name.endswith("rotary_emb.inv_freq")]
    if named:
        some = ", ".join(named[:3]) + (", …" if len(named) > 3 else "")
        logger.warning(
            "%s: the model has no parameter for %d of the checkpoint's tensors, which stay unused: %s",
            model, len(named), some,
        )  # fmt: skip


def _named_files(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"cannot load {str(index.parent)!r}: {index.name} is no index of safetensors files ({error})"
        ) from None
