"""How settings are declared, checked and read: a dataclass field has all that its flag needs to know."""

from __future__ import annotations

import re
from dataclasses import field, fields
from typing import Any

from fastdecode.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

LEAST_KV_CACHE_BYTES = 1000
"""Of an R-worker; less is a number without its unit."""


def setting(
    default: Any,
    text: str,
    group: str = "",
    *,
    unset: str = "",
    metavar: str | None = None,
    choices: tuple[str | int, ...] | None = None,
    least: int | None = None,
    most: int | None = None,
    also: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with all that its flag and its check need to know.

    ``text`` is its help, to which the default is added: ``unset`` where that says more. ``choices``, ``least`` and
    ``most`` are checked by ``check_settings``; None passes, it means "choose for me". ``also``: more names of
    the flag.
    """
    told: dict[str, Any] = {"help": text, "group": group, "unset": unset, "metavar": metavar, "choices": choices}
    told |= {"least": least, "most": most, "also": also}
    return field(default_factory=default, metadata=told) if callable(default) else field(default=default, metadata=told)


def check_settings(settings: Any) -> None:
    """ConfigError names the first field of a dataclass that is none of its choices or out of its range."""
    for each in fields(settings):
        value, told = getattr(settings, each.name), each.metadata
        choices, least, most = (told.get(name) for name in ("choices", "least", "most"))
        if choices and value not in (*choices, each.default):
            raise ConfigError(f"{each.name} must be one of {', '.join(map(str, choices))}, not {value!r}")
        if least is not None and value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{each.name} must be a whole number of at least {least}, not {value!r}")
            if most is not None and value > most:
                raise ConfigError(f"{each.name} must be at most {most}, not {value}")


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from 4294967296, "4GiB", "512MB" or "1.5G"; ConfigError names the setting."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", str(value), re.IGNORECASE)
    unit = (match.group(2) or "").upper() if match else ""
    size = int(float(match.group(1)) * (_BINARY_UNITS[unit + "i"] if match.group(3) else _UNITS[unit])) if match else 0
    if size < 1:
        raise ConfigError(f"{name} must be a positive number of bytes such as 4GiB or 512MB, not {value!r}")
    return size


def parse_kv_cache_memory(value: int | str) -> int:
    """Bytes of an R-worker's cache; ConfigError where a unit was forgotten."""
    size = parse_bytes("kv_cache_memory", value)
    if size < LEAST_KV_CACHE_BYTES:
        raise ConfigError(
            f"kv_cache_memory must be at least {LEAST_KV_CACHE_BYTES} bytes, not {value}; give a unit, such as 4GiB"
        )
    return size


def parse_cores(name: str, spec: str | None) -> list[int] | None:
    """Core numbers from "0,2-3"; ConfigError names the setting."""
    if spec is None:
        return None
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", spec):
        raise ConfigError(f"{name} must be a list of cores such as 0,2-3, not {spec!r}")
    ranges = [part.split("-") for part in spec.split(",")]
    cores = sorted({core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)})
    if not cores:
        raise ConfigError(f"{name}: {spec!r} names no core; ranges go upwards, such as 0-3")
    return cores
