"""Formats of checkpoints: the bits of a layer's weight as files hold them, and which of them the S-worker keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMATS = {
    "fp8": 8.02,
    "mxfp4": 4.25,
    "awq": 4.16,
    "gptq": 4.16,
    "int8": 8.06,
    "gguf-q8_0": 8.5,
    "gguf-q6_k": 6.56,
    "gguf-q5_k_m": 5.7,
    "gguf-q4_k_m": 4.85,
    "gguf-q4_0": 4.5,
}
"""Bits of a weight with its scales: of blocks of 128 x 128 (fp8), of 32 (mxfp4), of groups of 128 (awq, gptq) and of
rows (int8); of GGUF as llama.cpp gives them. Embeddings and the head stay in the model's dtype."""

KEPT_PACKED: frozenset[str] = frozenset()
"""Formats that the S-worker keeps as they are; it unpacks all others as it reads them."""


def format_of(quantization: Mapping[str, Any]) -> str | None:
    """Return the format that a ``quantization_config`` describes; None where the equations do not know it."""
    method = str(quantization.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        bits = {(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, Mapping)}
        return "int8" if bits == {8} else "gptq" if bits == {4} else None
    if method in ("awq", "gptq") and quantization.get("bits", 4) != 4:
        return "int8" if quantization.get("bits") == 8 else None
    return method if method in FORMATS else None
