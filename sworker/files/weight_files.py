"""Checks of a checkpoint's files: whole before they are read, and used up afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from fastdecode.core.errors import ModelLoadError

logger = logging.getLogger(__name__)


def check_files(folder: Path) -> None:
    """Raise ModelLoadError, which names the file, where a file of ``folder``'s checkpoint is missing or damaged.

    A model of the hub has no folder here, and nothing is checked.
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
    """Raise ModelLoadError, which names ``file``, unless it is a whole safetensors file."""
    where = f"cannot load {str(file.parent)!r}: {file.name}"
    # What a file begins with that Git has in place of a large one
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
    """Raise ModelLoadError for a tensor that is missing or has another shape; name in one line those left unused.

    ``info`` is what transformers says of its loading. It fills what a checkpoint lacks with random numbers. With
    ``fewer_layers`` the user has asked for a part of the model, so tensors are left over.
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
    """Warn, in one line, of tensors that no parameter takes."""
    named = [name for name in names if not name.endswith("rotary_emb.inv_freq")]  # computed from the configuration
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
