"""The model's generation_config.json: sampling defaults, and the ids that end a text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from fastdecode.api.config import EngineConfig
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import ConfigError, ModelLoadError
from fastdecode.core.optional import optional

logger = logging.getLogger(__name__)


def generation_defaults(config: EngineConfig, hf_config: Any) -> tuple[dict[str, Any], list[int]]:
    """Return the sampling defaults and the ids that end a text, from the model's generation_config.json.

    As in vLLM, the defaults apply to a request without sampling parameters. The file's end-of-text ids always apply,
    and so do those in a GGUF file. Impossible values are left out and logged, one line each.

    Raises:
        ModelLoadError: the file is no JSON object.
        ConfigError: the given folder has no such file, or ``override_generation_config`` has an impossible value.
    """
    file = Path(config.model) if str(config.model).endswith(".gguf") else None
    loaded = _loaded(config, file)
    asked = {} if config.generation_config == "vllm" else loaded
    asked = asked | config.override_generation_config
    own = optional("GGUF tokenizer").sampling(file) if file and config.generation_config != "vllm" else {}
    # Keys of generation_config.json that are used, the same as in vLLM, with the names of our sampling parameters
    names = {
        "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
        "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
    }  # fmt: skip
    wanted = own | {names[name]: asked[name] for name in names if asked.get(name) is not None}
    # Settings that transformers applies, and vLLM and we ignore, each with the value that has no effect
    not_taken = {
        "bad_words_ids": None, "begin_suppress_tokens": None, "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0, "exponential_decay_length_penalty": None, "forced_bos_token_id": None,
        "forced_eos_token_id": None, "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": None,
        "no_repeat_ngram_size": 0, "num_beams": 1, "penalty_alpha": None, "sequence_bias": None, "stop_strings": None,
        "suppress_tokens": None, "top_h": None, "typical_p": 1.0, "watermarking_config": None,
    }  # fmt: skip
    left = sorted(name for name, usual in not_taken.items() if asked.get(name) not in (None, usual, [], {}))
    if left:
        logger.warning("%s: not taken from %s: %s", config.model, GENERATION_CONFIG_NAME, ", ".join(left))
    text_config = hf_config.get_text_config()
    named = loaded.get("eos_token_id")
    ends = _listed(getattr(text_config, "eos_token_id", None) if named is None else named)
    every = dict.fromkeys([*ends, *(optional("GGUF tokenizer").ends(file) if file else ())])
    SamplingParams(**{names[name]: each for name, each in config.override_generation_config.items() if name in names})
    defaults = {name: value for name, value in wanted.items() if _can_be_meant(config.model, name, value)}
    return defaults, [each for each in every if _is_token(config.model, each, int(text_config.vocab_size))]


def _loaded(config: EngineConfig, file: Path | None) -> dict[str, Any]:
    """Return the content of generation_config.json, from the folder ``config.generation_config`` or from the model."""
    if config.generation_config in ("auto", "vllm"):
        return _read(str(file.parent) if file else config.model, config.revision)
    if not (Path(config.generation_config) / GENERATION_CONFIG_NAME).is_file():
        raise ConfigError(f"generation_config: {config.generation_config!r} has no {GENERATION_CONFIG_NAME}")
    return _read(config.generation_config, None)


def _read(model: str, revision: str | None) -> dict[str, Any]:
    try:
        found = cached_file(
            model, GENERATION_CONFIG_NAME, revision=revision, _raise_exceptions_for_missing_entries=False
        )
    except OSError:  # the hub cannot be reached, or the model has no such file
        return {}
    if found is None:
        return {}
    try:
        loaded = json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load {model!r}: {GENERATION_CONFIG_NAME} is not valid JSON ({error})") from None
    if not isinstance(loaded, Mapping):
        raise ModelLoadError(f"cannot load {model!r}: {GENERATION_CONFIG_NAME} must hold a JSON object")
    return dict(loaded)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _can_be_meant(model: str, name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except ConfigError as error:
        logger.warning("%s: %s is left out: %s", model, GENERATION_CONFIG_NAME, error)
        return False
    return True


def _is_token(model: str, token_id: Any, vocab_size: int) -> bool:
    if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < vocab_size:
        return True
    logger.warning("%s: eos_token_id %r is left out: ids are 0 to %d", model, token_id, vocab_size - 1)
    return False
