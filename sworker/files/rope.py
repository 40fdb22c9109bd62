"""Rotary embeddings in a configuration: user overrides, and the context length that a scaling allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastdecode.core.errors import ModelLoadError

KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Names of rope parameters that keep their values if a user sets only the scaling."""


def settings(text_config: Any) -> Iterator[dict[str, Any]]:
    """Yield the model's rope parameters: one set, or one per type of layer."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    yield from nested or [rope]


def override(text_config: Any, name: str, value: Any) -> None:
    """Set ``rope_theta``, ``rope_scaling`` or ``rope_parameters`` of a configuration.

    Raise ModelLoadError if the value is malformed, or if the model has separate parameters per type of layer.
    """
    before = getattr(text_config, "rope_parameters", None)
    if not isinstance(before, dict):
        raise ModelLoadError(f"hf_overrides: {text_config.model_type} has no rotary embedding, so {name} cannot be set")
    nested = any(isinstance(each, dict) for each in before.values())
    if name == "rope_theta" and not nested:
        before["rope_theta"] = float(value)
        return
    if not isinstance(value, Mapping) or (nested and not {*before} <= {*value}):
        wanted = f"an object for each of {', '.join(before)}" if nested else "an object with rope_type"
        raise ModelLoadError(f"hf_overrides: {name} must be {wanted}, not {str(value)[:80]}")
    if nested:
        text_config.rope_parameters = {kind: _completed(value[kind], before[kind], text_config) for kind in before}
    else:
        text_config.rope_parameters = _completed(value, before, text_config)


def _completed(value: Mapping[str, Any], before: Mapping[str, Any], text_config: Any) -> dict[str, Any]:
    kept = {name: before[name] for name in KEPT if name in before}
    told = kept | {name: each for name, each in value.items() if name != "type"}
    told["rope_type"] = value.get("rope_type", value.get("type", "default"))
    if told["rope_type"] in ("yarn", "longrope"):
        told.setdefault("original_max_position_embeddings", text_config.max_position_embeddings)
    return told


def check_named(text_config: Any) -> None:
    """Raise ModelLoadError for an unknown kind of scaling, or for a factor without a kind.

    transformers ignores a factor without a kind.
    """
    for rope in settings(text_config):
        kind = rope.get("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
            raise ModelLoadError(f"rope_scaling: rope_type {kind!r} is not known: {known} are")
        if kind == "default" and (rope.get("factor") or 1.0) != 1.0:
            raise ModelLoadError(
                f"rope_scaling: the factor {rope['factor']} is of no kind: give rope_type, such as linear or yarn, "
                "beside it in config.json, or by --hf-overrides"
            )


def reach(text_config: Any, longest: int) -> int:
    """Return the longest context that a user may ask for: ``longest``, the configuration's, or more with scaled rope.

    Linear scaling multiplies the configuration's length, and YaRN its original length, as in vLLM. For other kinds, and
    for parameters per type of layer, the configuration already has the scaled length.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), float(rope.get("factor") or 1.0)
    if kind == "linear":
        return int(longest * factor)
    if kind == "yarn":
        return max(longest, int((rope.get("original_max_position_embeddings") or longest) * factor))
    return longest
