"""Makes ``SamplingParams`` take vLLM's fields: those without effect are dropped, others are refused with a cure."""

from __future__ import annotations

import functools
import logging
from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, TypeVar

from fastdecode.api.vllm.python import SAMPLING_IGNORED, SAMPLING_REFUSED
from fastdecode.core.errors import ConfigError

logger = logging.getLogger(__name__)

Params = TypeVar("Params", bound=type)


def takes_vllms_fields(kind: Params) -> Params:
    """Have a frozen dataclass take the fields that vLLM's ``SamplingParams`` has besides.

    It says what to do instead of setting a field, where vLLM's parameters may be changed.
    """
    made: Any = kind
    init, known = made.__init__, made.__dataclass_fields__

    @functools.wraps(init)
    def __init__(self: Any, **fields: Any) -> None:
        init(self, **_ours(fields, known))

    def __setattr__(self: Any, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(
            f"sampling parameters do not change: make others with dataclasses.replace(params, {name}={value!r:.40})"
        )

    made.__init__, made.__setattr__ = __init__, __setattr__
    return kind


def _ours(fields: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` without vLLM's; ConfigError for one that would give another text, or that nobody knows."""
    if fields.keys() <= known.keys():
        return fields
    found = {name: value for name, value in fields.items() if name in known}
    ignored = []
    for name in sorted(fields.keys() - known.keys()):
        each = SAMPLING_IGNORED.get(name) or SAMPLING_REFUSED.get(name)
        if each is None:
            raise ConfigError(f"SamplingParams: unknown field {name!r}; known are {', '.join(known)}")
        if each.refused and not each.asks_for_nothing(fields[name]) and not _says_n(name, fields):
            raise ConfigError(f"{name}: {each.text}")
        ignored += [name] if not each.refused and not each.asks_for_nothing(fields[name]) else []
    if ignored:
        logger.warning("fields of vLLM's SamplingParams that mean nothing here are ignored: %s", ", ".join(ignored))
    return found


def _says_n(name: str, fields: dict[str, Any]) -> bool:
    """Return whether it is a best_of that asks for no more than n."""
    return name == "best_of" and fields[name] == fields.get("n", 1)
