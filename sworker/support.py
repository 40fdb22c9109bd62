"""Which models can be split into S-part and R-part, told from their configuration before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from fastdecode.errors import UnsupportedModelError

SUPPORTED = "decoder-only causal language models whose attention goes through transformers' AttentionInterface"


def refuse(hf_config: Any, what_it_does: str) -> NoReturn:
    """Raise UnsupportedModelError with the reason and what would be right."""
    raise UnsupportedModelError(
        f"{hf_config.model_type}: this model {what_it_does}, so its attention cannot be handed to R-workers; "
        f"supported are {SUPPORTED}"
    )


def check_config(hf_config: Any) -> None:
    """Refuse what the probe could not see: wrong results rather than missing calls."""
    text_config = hf_config.get_text_config()
    if getattr(hf_config, "is_encoder_decoder", False):
        refuse(hf_config, "is an encoder-decoder model")
    if getattr(text_config, "alibi", False) or getattr(getattr(text_config, "attn_config", None), "alibi", False):
        refuse(hf_config, "adds a position bias to its scores (ALiBi)")
    if getattr(text_config, "num_hidden_layers", 1) < 1:
        refuse(hf_config, "has no layers")
    unknown = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        refuse(hf_config, f"has layers of type {', '.join(sorted(unknown))}")


def check_rope(hf_config: Any, max_model_len: int) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest position of the whole batch."""
    text_config = hf_config.get_text_config()
    for rope in _rope_settings(text_config):
        kind = rope.get("rope_type", "default")
        own = getattr(text_config, "max_position_embeddings", 0)
        short = rope.get("original_max_position_embeddings") or own
        limit = {"longrope": short, "dynamic": own}.get(kind)
        if limit is not None and max_model_len > limit:
            refuse(
                hf_config,
                f"changes its {kind} rotary frequencies beyond {limit} tokens for a whole batch at once; "
                f"it runs with --max-model-len {limit} or less",
            )


def _rope_settings(text_config: Any) -> Iterator[dict[str, Any]]:
    """The model's rope settings, one per layer type where they differ."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    yield from nested or [rope]
