"""Translates, ignores or refuses settings and method arguments of code that was written for vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.api.vllm import engine, environment, serving
from fastdecode.api.vllm.engine import ADAPTERS
from fastdecode.api.vllm.foreign import Foreign
from fastdecode.api.vllm.python import CALL_ARGUMENTS, MEMBERS, NAMES
from fastdecode.api.vllm.values import drafts, translate
from fastdecode.core.errors import ConfigError

__all__ = ["MEMBERS", "NAMES"]

logger = logging.getLogger(__name__)

RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}
"""Settings with another name here than in vLLM: our name by vLLM's."""

OF_ENGINES = engine.WITHOUT_EFFECT | engine.REFUSED
OF_SERVERS = serving.WITHOUT_EFFECT | serving.REFUSED
OF_BATCHES = serving.OF_BATCHES
FOREIGN: Mapping[str, Foreign] = OF_ENGINES | OF_SERVERS
"""Every vLLM setting and flag for which FastDecode has no field, by name."""

IGNORED = frozenset(name for name, each in FOREIGN.items() if not each.refused)
REFUSED = {name: each.text for name, each in FOREIGN.items() if each.refused}


def asks_for_nothing(value: Any, neutral: tuple[Any, ...] = ()) -> bool:
    """Return whether ``value`` means the same as leaving the field out, as each value in ``neutral`` does."""
    return value is None or value is False or value in ("", [], {}) or value in neutral


def EngineArgs(**settings: Any) -> EngineConfig:
    """Return an ``EngineConfig`` made from vLLM's or our settings. vLLM has a class of this name.

    Raise ConfigError for a setting that is not supported.
    """
    if settings.get("model_impl") != "vllm" and (sentence := environment.said()):
        logger.warning("%s", sentence)
    # Settings of vLLM's engine that are flags of ``fastdecode serve`` here
    of_the_server = frozenset(
        {
            "enable_auto_tool_choice",
            "max_num_queued_reqs",
            "otlp_traces_endpoint",
            "reasoning_parser",
            "served_model_name",
            "shutdown_timeout",
            "tool_call_parser",
        }
    )
    found, known = as_ours(settings, also_ignored=of_the_server), EngineConfig.__dataclass_fields__
    unknown = sorted(found.keys() - known.keys())
    if unknown:
        raise ConfigError(f"LLM: unknown setting {unknown[0]!r}; known are {', '.join(known)}")
    return EngineConfig(**found)


def as_ours(settings: Mapping[str, Any], also_ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return vLLM's ``settings`` under our names, with our values, and without those that only vLLM has.

    One line of the log names the ignored settings. A setting whose value is None counts as left out.

    Raises:
        ConfigError: the engine cannot do what a setting asks for. The message says what to do instead.
    """
    check_foreign(settings, also_ignored)
    left = {name: value for name, value in settings.items() if name not in FOREIGN and name not in also_ignored}
    found = {RENAMED.get(name, name): translate(name, value) for name, value in drafts(left).items()}
    return {name: value for name, value in found.items() if value is not None or not _has_a_default(name)}


def check_foreign(
    settings: Mapping[str, Any],
    also_ignored: frozenset[str] = frozenset(),
    foreign: Mapping[str, Foreign] = FOREIGN,
) -> None:
    """Log on one line which of the vLLM ``settings`` have no effect here.

    Raise ConfigError for a setting that is not supported; the message says what to do instead.
    """
    asked = {name for name in foreign.keys() & settings.keys() if not foreign[name].asks_for_nothing(settings[name])}
    ignored = sorted(name for name in asked if not foreign[name].refused) + sorted(
        name for name in also_ignored & settings.keys() if not asks_for_nothing(settings[name])
    )
    if ignored:
        replaced = [name for name in ("gpu_memory_utilization", "numa_bind") if name in ignored]
        advice = "".join(f"; {name}: {foreign[name].text}" for name in replaced)
        logger.warning("settings of vLLM that mean nothing here are ignored: %s%s", ", ".join(ignored), advice)
    for name in sorted(asked - set(ignored)):
        raise ConfigError(f"{name}: {foreign[name].text}")


def check_call(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``arguments`` of a vLLM method call are unknown, or would change the generated texts."""
    for name, value in arguments.items():
        if name not in CALL_ARGUMENTS:
            raise ConfigError(f"unknown argument {name!r}")
        each = CALL_ARGUMENTS[name]
        values = value if isinstance(value, list | tuple) else [value]
        if not all(map(each.asks_for_nothing, values)):
            raise ConfigError(f"{name}: {each.text}")


def check_lora(request: Any) -> None:
    """Raise ConfigError if ``request`` (vLLM's ``lora_request``) asks for an adapter."""
    if request is not None:
        raise ConfigError(f"lora_request: {ADAPTERS}")


def _has_a_default(name: str) -> bool:
    """Return whether the ``EngineConfig`` field ``name`` has a default other than None."""
    field = EngineConfig.__dataclass_fields__.get(name)
    return field is not None and (field.default_factory is not MISSING or field.default is not None)
