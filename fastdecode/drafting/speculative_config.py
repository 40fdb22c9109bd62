"""The setting ``--speculative-config``, with vLLM's names and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fastdecode.core.errors import ConfigError

LOOKUP_TOKENS = 5
"""The default of vLLM's prompt_lookup_max and prompt_lookup_min."""

_OF_METHOD = {"ngram": ("prompt_lookup_max", "prompt_lookup_min"), "draft_model": ("model",)} | {
    "early_exit": ("num_layers",)
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """A drafting method, and its settings. It drafts at most ``num_speculative_tokens`` per sequence and step.

    ngram: the tokens that followed an earlier occurrence of the sequence's last ``prompt_lookup_min`` to
    ``prompt_lookup_max`` tokens. draft_model: tokens that ``model`` generates, a smaller model with the same
    vocabulary. early_exit: tokens that the model's own first ``num_layers`` layers, norm and head generate.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = LOOKUP_TOKENS
    prompt_lookup_min: int = LOOKUP_TOKENS
    model: str = ""
    num_layers: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any]) -> SpeculativeConfig | None:
        """Return ``settings`` as a checked configuration; None if they are empty.
        Raise ConfigError for a setting that is missing, unknown or out of range.
        """
        if not settings:
            return None
        method = settings.get("method")
        methods = ("ngram", "draft_model", "early_exit")
        if method not in methods:
            raise ConfigError(f"speculative_config: method must be one of {', '.join(methods)}, not {method!r}")
        known = {"method", "num_speculative_tokens", *_OF_METHOD[method]}
        if unknown := sorted(set(settings) - known):
            elsewhere = {each.name for each in fields(SpeculativeConfig)} & set(unknown)
            what = "is for another method" if elsewhere else "is unknown"
            raise ConfigError(
                f"speculative_config: method {method} takes {', '.join(sorted(known - {'method'}))}; "
                f"{unknown[0]!r} {what}"
            )
        # Limit of draft tokens per sequence and step: a larger setting is most likely a typing error
        max_speculative_tokens = 64
        count = _whole(settings, "num_speculative_tokens", 1, max_speculative_tokens)
        if method == "ngram":
            given = [name for name in ("prompt_lookup_max", "prompt_lookup_min") if name in settings]
            lookup = {name: _whole(settings, name, 1, 1024) for name in given}
            most = lookup.get("prompt_lookup_max", lookup.get("prompt_lookup_min", LOOKUP_TOKENS))
            least = lookup.get("prompt_lookup_min", most)
            if least > most:
                raise ConfigError(
                    f"speculative_config: prompt_lookup_min ({least}) must be at most prompt_lookup_max ({most})"
                )
            return SpeculativeConfig(method, count, most, least)
        if method == "early_exit":
            return SpeculativeConfig(method, count, num_layers=_whole(settings, "num_layers", 1, 1 << 16))
        model = settings.get("model")
        if not isinstance(model, str) or not model:
            raise ConfigError(f"speculative_config: draft_model needs a model, given as a path or an id, not {model!r}")
        return SpeculativeConfig(method, count, model=model)


def _whole(settings: Mapping[str, Any], name: str, least: int, most: int) -> int:
    if name not in settings:
        raise ConfigError(f"speculative_config: {name} is missing: give a whole number from {least} to {most}")
    value = settings[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"speculative_config: {name} must be a whole number from {least} to {most}, not {value!r}")
    return value
