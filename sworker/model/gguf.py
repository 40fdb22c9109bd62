"""GGUF: one file with the weights, configuration and tokenizer of a model, which transformers reads and unpacks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import GgufConfig

from fastdecode.core.errors import ModelLoadError

NEEDED = ("gguf", "accelerate")
"""Packages with which transformers reads such a file."""


def source(model: str) -> tuple[str, dict[str, str]]:
    """Return the arguments of ``from_pretrained``, positional and by name: of PATH.gguf its folder and its file.

    ModelLoadError where there is no such file, or a package to read it is not installed.
    """
    path = Path(model)
    if path.suffix != ".gguf":
        return model, {}
    if not path.is_file():
        raise ModelLoadError(f"cannot load {model!r}: no such file")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        raise ModelLoadError(f"cannot load {model!r}: GGUF files need {needs}: pip install 'fastdecode[gguf]'")
    return str(path.parent), {"gguf_file": path.name}


def weights_source(model: str) -> tuple[str, dict[str, Any]]:
    """Return ``source`` for weights: they are unpacked, since packed ones take attention and products of their own."""
    name, named = source(model)
    return name, named | ({"quantization_config": GgufConfig(dequantize=True)} if named else {})


def unpacked(model: Any) -> Any:
    """``model`` as a plain one that moves between devices and can be saved: it forgets how its file was packed."""
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer = None
        model.is_quantized = False
        model.quantization_method = None
        del model.config.quantization_config
    return model
