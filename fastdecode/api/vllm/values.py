"""Translates vLLM's spellings of setting values to FastDecode's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastdecode.core.errors import ConfigError

DTYPE_SETTINGS = ("dtype", "kv_cache_dtype", "mamba_ssm_cache_dtype")

COUNTS = ("max_model_len", "max_num_batched_tokens", "kv_load_limit", "kv_shard_tokens")
"""Settings that are counts, which vLLM lets users write as "4k"."""


def read_count(text: str) -> int:
    """Return the integer that ``text`` means, as vLLM reads it: "4096", "4k" (4,000), "4K" (4,096), "1.5m".

    Raises:
        ValueError: one line that says what would be right.
    """
    match = re.fullmatch(r"(\d+)(\.\d+)?([kKmMgGtT])", text.strip())
    if not match:
        if not re.fullmatch(r"-?\d+", text.strip()):
            raise ValueError(f"must be a whole number such as 4096, 4k (4,000) or 4K (4,096), not {text!r}")
        return int(text)
    whole, fraction, unit = match.groups()
    if fraction and unit.isupper():
        raise ValueError(
            f"must have no fraction before {unit}, a power of two: give {text.strip().lower()}, or a whole number"
        )
    multiples = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return round(float(whole + (fraction or "")) * multiples[unit]) if fraction else int(whole) * multiples[unit]


def translate(name: str, value: Any) -> Any:
    """Return ``value`` of setting ``name`` in FastDecode's spelling. Raise ConfigError if no such value exists."""
    if name in DTYPE_SETTINGS and value is not None:
        return _dtype(name, str(value).removeprefix("torch."))  # str() also handles a torch.dtype
    if name in COUNTS:
        return _count(name, value)
    if name == "kv_cache_memory_bytes" and isinstance(value, str):
        return _count(name, value)
    if name == "quantization" and value in ("gguf", "none"):
        return None  # the checkpoint's files say which format they have
    if name == "quantization" and isinstance(value, str):
        return value.removesuffix("_marlin")  # vLLM's name of a kernel for the same format
    # vLLM's load formats that our loader detects from the files by itself
    load_formats = dict.fromkeys(("safetensors", "hf", "gguf", "fastsafetensors", "instanttensor", "mistral"), "auto")
    if name == "load_format":
        return load_formats.get(value, value)
    if name == "lora_modules" and isinstance(value, list | tuple):
        return [pair for each in value for pair in _adapters(each)]
    return value


def drafts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with vLLM's short settings of speculative decoding merged into ``speculative_config``."""
    draft_shortcuts = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
    given = {name: value for name, value in settings.items() if name not in draft_shortcuts}
    shortcuts = {draft_shortcuts[name]: settings[name] for name in draft_shortcuts if settings.get(name) is not None}
    config = given.get("speculative_config")
    if not shortcuts and not (config and isinstance(config, Mapping)):
        return given
    found = dict(config or {}) | shortcuts
    if found.get("draft_tensor_parallel_size") == 1:
        del found["draft_tensor_parallel_size"]
    if found.get("method") is None and found.get("model"):
        found["method"] = "ngram" if found["model"] in ("ngram", "[ngram]") else "draft_model"
    if found.get("method") == "ngram":
        found.pop("model", None)
    return given | {"speculative_config": found}


def _dtype(name: str, value: str) -> str:
    if name == "kv_cache_dtype" and value.startswith("fp8"):
        raise ConfigError(f"kv_cache_dtype: {value} is not there: int8 takes as many bytes, int4 half of them")
    dtypes = {"half": "float16", "float": "float32"}
    return dtypes.get(value, value)


def _count(name: str, value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() != "auto":
        try:
            value = read_count(value)
        except ValueError as error:
            raise ConfigError(f"{name} {error}") from None
    if name == "max_model_len" and (value == -1 or isinstance(value, str)):
        return None
    return value


def _adapters(value: Any) -> list[Any]:
    """Return a list of "NAME=FOLDER" for ``value``: vLLM's JSON object of a LoRA adapter, or a list of such objects."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"lora_modules: not valid JSON: {error}; it was {value!r:.80}") from None
    each = value if isinstance(value, list) else [value]
    return [f"{one['name']}={one['path']}" if _names_a_folder(one) else one for one in each]


def _names_a_folder(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("name")) and bool(value.get("path"))
