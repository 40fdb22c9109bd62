"""Declares, checks and parses settings. Each dataclass field carries everything that its flag needs."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.core.parked import PARK_AFTER, ParkPlace

ON_R_WORKERS = "r-workers"
"""The value of ``--journal`` that keeps the journal in the R-workers' memory instead of a folder."""

MAX_SESSION = 200
"""Most characters of a session's name."""


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
    """Return a dataclass field that carries its flag's text and its check's bounds.

    ``text``: the flag's help, to which the default is appended, or ``unset`` if given. ``check_settings`` checks
    ``choices``, ``least`` and ``most``; None means "choose for me" and passes. ``also``: more names of the flag.
    """
    told: dict[str, Any] = {"help": text, "group": group, "unset": unset, "metavar": metavar, "choices": choices}
    told |= {"least": least, "most": most, "also": also}
    return field(default_factory=default, metadata=told) if callable(default) else field(default=default, metadata=told)


def check_settings(settings: Any) -> None:
    """Raise ConfigError for the first field of ``settings`` that is out of its range or not one of its choices."""
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
    """Return the bytes that ``value`` ("4GiB", "512MB", "1.5G", 4294967296) means. A ConfigError names ``name``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", str(value), re.IGNORECASE)
    unit = (match.group(2) or "").upper() if match else ""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    binary_units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    size = int(float(match.group(1)) * (binary_units[unit + "i"] if match.group(3) else units[unit])) if match else 0
    if size < 1:
        raise ConfigError(f"{name} must be a positive number of bytes such as 4GiB or 512MB, not {value!r}")
    return size


def parse_kv_cache_memory(value: int | str) -> int:
    """Return an R-worker's KV cache size ``value`` in bytes. Raise ConfigError if the user forgot the unit."""
    size = parse_bytes("kv_cache_memory", value)
    # Fewest bytes of an R-worker's KV cache: for a smaller number, the user forgot the unit
    least_kv_cache_bytes = 1000
    if size < least_kv_cache_bytes:
        raise ConfigError(
            f"kv_cache_memory must be at least {least_kv_cache_bytes} bytes, not {value}; give a unit, such as 4GiB"
        )
    return size


def parse_park(folder: str | None, after_seconds: float | None, most_bytes: int | str | None) -> ParkPlace | None:
    """Return the folder and limits for parked prefixes; None if ``folder`` is None.

    Raise ConfigError if other parking settings are given without a folder.
    """
    if folder is None:
        for name, value in (("park_after", after_seconds), ("park_bytes", most_bytes)):
            if value is not None:
                raise ConfigError(f"{name}: there is no folder to park in: give --park-dir DIR as well")
        return None
    after = PARK_AFTER if after_seconds is None else after_seconds
    # Longest ``--park-after`` in seconds; more would mean never
    most_park_after = 30 * 86400.0
    if not 0 <= after <= most_park_after:
        raise ConfigError(f"park_after must be 0 to {most_park_after:g} seconds, not {after_seconds!r}")
    return ParkPlace(
        Path(folder).absolute(), None if most_bytes is None else parse_bytes("park_bytes", most_bytes), after
    )


def parse_lora_modules(values: Sequence[str]) -> tuple[str, str] | None:
    """Return the name and the folder of the one LoRA adapter that ``values`` names.

    Each value is "NAME=FOLDER" or vLLM's {"name": NAME, "path": FOLDER} as JSON. Raise ConfigError for other forms.
    """
    if len(values) > 1:
        raise ConfigError(
            f"lora_modules: one adapter is merged into the weights of an engine, not {len(values)} "
            f"({', '.join(map(str, values))}): start an engine for each"
        )
    for value in values:
        name, _, folder = str(value).partition("=")
        if str(value).lstrip().startswith("{"):
            name, folder = _json_lora_module(str(value))
        if not name or not folder:
            raise ConfigError(f"lora_modules must be NAME=FOLDER, not {value!r}")
        return name, folder
    return None


def _json_lora_module(text: str) -> tuple[str, str]:
    try:
        told = json.loads(text)
    except ValueError:
        return "", ""
    name, folder = told.get("name"), told.get("path")
    return (name, folder) if isinstance(name, str) and isinstance(folder, str) else ("", "")


def parse_cores(name: str, spec: str | None) -> list[int] | None:
    """Return the core numbers in ``spec``, a list such as "0,2-3". A ConfigError names the setting ``name``."""
    if spec is None:
        return None
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", spec):
        raise ConfigError(f"{name} must be a list of cores such as 0,2-3, not {spec!r}")
    ranges = [part.split("-") for part in spec.split(",")]
    cores = sorted({core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)})
    if not cores:
        raise ConfigError(f"{name}: {spec!r} names no core; ranges go upwards, such as 0-3")
    return cores


SECURITY_LEVELS = ("encrypt", "authenticate")
"""Levels of security with a key file: "encrypt" authenticates and encrypts; "authenticate" sends data unencrypted."""

MAX_HERE = 1024
"""Most workers of one kind on one machine; a higher number is taken for a typing error."""


@dataclass(frozen=True)
class WorkerSpec:
    """A group of R-workers or prefill workers. ``kind``: "inproc", "spawn", "tcp", "mpi", "join" or "ray".

    ``addresses``: the "host:port" of each worker, for tcp. ``count``: the number of workers; 0 for R-workers of mpi,
    which are all other ranks of the job. For join, the engine waits for ``count`` workers. ``strict_spread``: Ray
    places no two workers on one node.
    """

    kind: str
    count: int
    addresses: tuple[str, ...] = ()
    strict_spread: bool = False

    @property
    def on_this_machine(self) -> bool:
        """True if this process starts the workers, so that they share its memory and cores."""
        return self.kind in ("inproc", "spawn")


def parse_prefill_workers(spec: str) -> WorkerSpec:
    """Return the parsed ``--prefill-workers``: "spawn:N", "mpi:N" or "host:port,host:port".

    Raise ConfigError for anything else, and for a repeated address.
    """
    if match := re.fullmatch(r"(spawn|mpi):([1-9]\d{0,3})", spec):
        return WorkerSpec(match.group(1), _count("prefill_workers", match))
    if not _ADDRESSES.fullmatch(spec) or re.match(r"(spawn|mpi):", spec):
        raise ConfigError(f"prefill_workers must be spawn:N, mpi:N or host:port,host:port, not {spec!r}")
    addresses = _split_addresses("prefill_workers", "a prefill worker", spec)
    return WorkerSpec("tcp", len(addresses), addresses)


def parse_r_workers(spec: str) -> WorkerSpec:
    """Return the parsed ``--r-workers``: inproc[:N], spawn:N, join:N, ray:N[:strict-spread], mpi or host:port,….

    Raise ConfigError for anything else, and for a repeated address.
    """
    if match := re.fullmatch(r"ray:([1-9]\d{0,5})(:strict-spread)?", spec):
        return WorkerSpec("ray", int(match.group(1)), strict_spread=bool(match.group(2)))
    if match := re.fullmatch(r"(inproc|spawn|join):([1-9]\d{0,5})", spec):
        return WorkerSpec(match.group(1), _count("r_workers", match))
    if spec == "inproc":
        return WorkerSpec("inproc", 1)
    if spec == "mpi":
        return WorkerSpec("mpi", 0)
    if not _ADDRESSES.fullmatch(spec) or re.match(r"(inproc|spawn|join|mpi|ray):", spec):
        raise ConfigError(
            f"r_workers must be inproc, inproc:N, spawn:N, join:N, ray:N, mpi or host:port,host:port, not {spec!r}"
        )
    addresses = _split_addresses("r_workers", "an R-worker", spec)
    return WorkerSpec("tcp", len(addresses), addresses)


def _count(name: str, match: re.Match[str]) -> int:
    """Return the number of workers that the regex ``match`` of a worker spec found; ``name``: the setting.

    Raise ConfigError for more than MAX_HERE workers of a kind that runs on this machine.
    """
    count = int(match.group(2))
    if match.group(1) in ("inproc", "spawn") and count > MAX_HERE:
        raise ConfigError(f"{name}: {match.group()} is more than {MAX_HERE}, the most on one machine")
    return count


_ADDRESSES = re.compile(r"[^:,\s]+:\d+(,[^:,\s]+:\d+)*")


def _split_addresses(name: str, worker: str, spec: str) -> tuple[str, ...]:
    """Return the addresses in "host:port,host:port". Raise ConfigError for a malformed or repeated address."""
    addresses = tuple(spec.split(","))
    for address in addresses:
        split_address(name, address)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"{name}: {spec!r} names {worker} twice")
    return addresses


def split_address(name: str, address: str, least_port: int = 1) -> tuple[str, int]:
    """Return the host and port in ``address``, "host:port". A ConfigError names the setting ``name``."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\*):(\d{1,5})", address)
    if not match or not least_port <= int(match.group(2)) <= 65535:
        raise ConfigError(f"{name}: an address is host:port, with a port of {least_port} to 65535, not {address!r}")
    return match.group(1), int(match.group(2))


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine's loopback.

    Host names other than localhost are not resolved, and count as remote.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_key(name: str, hosts: list[str], key_file: str | None) -> None:
    """Raise ConfigError, naming setting ``name``, if one of ``hosts`` is remote and ``key_file`` is empty."""
    beyond = [host for host in hosts if not is_loopback(host)]
    if beyond and not key_file:
        raise ConfigError(
            f"{name}: {beyond[0]} is reached over a network, which takes a --key-file on both sides (32 random bytes "
            f"that only their owner can read: openssl rand -hex 32 > FILE; chmod 600 FILE)"
        )


def check_security(level: str | None, key_file: str | None) -> None:
    """Raise ConfigError for an unknown level, or a level without a key file."""
    if level is not None and level not in SECURITY_LEVELS:
        raise ConfigError(f"security must be one of {', '.join(SECURITY_LEVELS)}, not {level!r}")
    if level is not None and not key_file:
        raise ConfigError(f"security: {level} rests on a secret that both sides hold: give --key-file as well")


def describe_security(level: str | None, key_file: str | None) -> str:
    """Return a phrase for logs that says how connections to R-workers are secured."""
    if not key_file:
        return "loopback, not encrypted"
    return "authenticated, NOT encrypted" if level == "authenticate" else "CURVE, authenticated and encrypted"
