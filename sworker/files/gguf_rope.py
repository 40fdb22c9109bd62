"""The rotary embedding of a GGUF file: its base, how many dims of a head it rotates, and the frequencies' scaling.

transformers' reader silently drops every scaling, and the tensors that scale single frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict

from fastdecode.core.errors import ModelLoadError

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors whose numbers divide rotary frequencies: Llama 3's and LongRoPE's."""

TENSORS = (FREQUENCIES, LONG, SHORT)

KEYS = {
    "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "rope.scaling.attn_factor",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip
"""Keys that this module reads."""

OTHER_NAMES = {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"}
"""Keys in files of converters other than llama.cpp's, and llama.cpp's keys."""


def set_rope(hf_config: Any, keys: Mapping[str, Any], tensors: Sequence[str], file: Path, whole: bool) -> None:
    """Set the rotary embedding of ``hf_config``, or only the scaling of its frequencies if ``whole`` is false.

    ``keys``: the file's keys without the architecture's prefix. Raise ModelLoadError if the embedding is unsupported.
    """
    parameters = getattr(hf_config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    factors = {name: _read(file, name) for name in TENSORS if name in tensors}
    scaling = _Scaling(keys, factors, hf_config.get_text_config().max_position_embeddings, file).parameters()
    # layers with a window have a rotary embedding of their own, which is never scaled
    if "full_attention" in parameters:
        own, parameters = parameters["sliding_attention"], parameters["full_attention"]
        own["rope_theta"] = keys.get("rope.freq_base_swa", own["rope_theta"])
    # Base of the rotary frequencies if a file names none
    usual_base = 10000.0
    if whole:
        parameters["rope_theta"] = keys.get("rope.freq_base", usual_base)
        _set_part(hf_config, parameters, keys, file)
    if scaling:
        for name in {*parameters} - {"rope_theta", "partial_rotary_factor"}:
            del parameters[name]
        parameters.update(scaling)
        original = scaling.get("original_max_position_embeddings")
        if original and hasattr(hf_config, "original_max_position_embeddings"):
            hf_config.original_max_position_embeddings = original


def head_dim(hf_config: Any) -> int:
    """Return the size of a head of queries and keys."""
    return int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads)


def _read(file: Path, name: str) -> list[float]:
    factors: list[float] = load_gguf_state_dict(GgufHeader.from_file(str(file)))[name][...].float().flatten().tolist()
    return factors


def _set_part(hf_config: Any, parameters: dict[str, Any], keys: Mapping[str, Any], file: Path) -> None:
    size = head_dim(hf_config)
    rotated = keys.get("rope.dimension_count", size)
    if "partial_rotary_factor" in parameters:
        parameters["partial_rotary_factor"] = rotated / size
    elif rotated != size:
        raise ModelLoadError(
            f"cannot load {str(file)!r}: rope.dimension_count is {rotated}, and {hf_config.model_type} rotates all "
            f"{size} dimensions of a head: give the folder that the file was made from"
        )


class _Scaling:
    """The scaling of rotary frequencies in a GGUF file, as llama.cpp reads it."""

    def __init__(self, keys: Mapping[str, Any], factors: Mapping[str, list[float]], longest: int, file: Path) -> None:
        """``longest``: the model's context length. ``factors``: one factor per frequency, by name of their tensor."""
        self._keys, self._factors, self._longest, self._file = keys, factors, longest, file
        self._kind = keys.get("rope.scaling.type") or "linear"
        named = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
        self._factor = 1.0 if self._kind == "none" else float(named)
        self._strength = float(keys.get("rope.scaling.attn_factor") or 1.0)
        self._original = int(keys.get("rope.scaling.original_context_length") or longest)

    def parameters(self) -> dict[str, Any] | None:
        """Return transformers' ``rope_parameters`` for this scaling; None if frequencies are not scaled."""
        if self._kind == "yarn" and not self._factors:
            return self._yarn() if self._factor != 1.0 else None
        if self._kind == "longrope" and {*self._factors} == {LONG, SHORT}:
            return self._by_factors(self._factors[SHORT], self._factors[LONG], self._original)
        if self._kind in ("linear", "none", "default") and {*self._factors} == {FREQUENCIES}:
            own = [each * self._factor for each in self._factors[FREQUENCIES]]
            return self._by_factors(own, own, self._longest)
        if self._kind in ("linear", "none", "default") and not self._factors and self._strength == 1.0:
            return {"rope_type": "linear", "factor": self._factor} if self._factor != 1.0 else None
        raise ModelLoadError(
            f"cannot load {str(self._file)!r}: rope.scaling.type {self._kind!r} with attn_factor {self._strength} and "
            f"{', '.join(self._factors) or 'no tensors of factors'} is not understood: give the folder that the file "
            "was made from"
        )

    def _yarn(self) -> dict[str, Any]:
        told = {"rope_type": "yarn", "factor": self._factor, "original_max_position_embeddings": self._original}
        for name in ("beta_fast", "beta_slow"):
            if (value := self._keys.get(f"rope.scaling.yarn_{name}")) is not None:
                told[name] = value
        if self._strength != 1.0:
            told["attention_factor"] = (0.1 * math.log(self._factor) + 1.0) * self._strength
        return told

    def _by_factors(self, short: list[float], long: list[float], original: int) -> dict[str, Any]:
        """Return LongRoPE's parameters, which scale each frequency by its own factor."""
        return {
            "rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": self._longest / original,
            "attention_factor": self._strength, "original_max_position_embeddings": original,
        }  # fmt: skip
