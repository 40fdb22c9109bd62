"""Where R-workers are: the ``--r-workers`` setting, and host:port addresses."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from fastdecode.errors import ConfigError

SECURITY_LEVELS = ("encrypt", "authenticate")
"""What a key file is for: authenticated and encrypted connections, or authenticated ones that carry clear data."""


@dataclass(frozen=True)
class RWorkerSpec:
    """``kind``: "inproc", "spawn", "tcp" or "mpi"; ``addresses``: "host:port" of each, for tcp.

    ``count`` is 0 for mpi: as many as the job has ranks beside this one.
    """

    kind: str
    count: int
    addresses: tuple[str, ...] = ()

    @property
    def on_this_machine(self) -> bool:
        """True where this process starts them, so that they share its memory and cores."""
        return self.kind in ("inproc", "spawn")


def parse_r_workers(spec: str) -> RWorkerSpec:
    """inproc, inproc:N, spawn:N, mpi or host:port,host:port; ConfigError for anything else, or an address twice."""
    if match := re.fullmatch(r"(inproc|spawn):([1-9]\d{0,5})", spec):
        return RWorkerSpec(match.group(1), int(match.group(2)))
    if spec == "inproc":
        return RWorkerSpec("inproc", 1)
    if spec == "mpi":
        return RWorkerSpec("mpi", 0)
    if not re.fullmatch(r"[^:,\s]+:\d+(,[^:,\s]+:\d+)*", spec) or re.match(r"(inproc|spawn|mpi):", spec):
        raise ConfigError(f"r_workers must be inproc, inproc:N, spawn:N, mpi or host:port,host:port, not {spec!r}")
    addresses = tuple(spec.split(","))
    for address in addresses:
        split_address("r_workers", address)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"r_workers: {spec!r} names an R-worker twice")
    return RWorkerSpec("tcp", len(addresses), addresses)


def split_address(name: str, address: str, least_port: int = 1) -> tuple[str, int]:
    """Host and port of "host:port"; ConfigError names the setting."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\*):(\d{1,5})", address)
    if not match or not least_port <= int(match.group(2)) <= 65535:
        raise ConfigError(f"{name}: an address is host:port, with a port of {least_port} to 65535, not {address!r}")
    return match.group(1), int(match.group(2))


def is_loopback(host: str) -> bool:
    """True for addresses that never leave this machine; names other than localhost are not looked up, and count as
    another's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_key(name: str, hosts: list[str], key_file: str | None) -> None:
    """ConfigError for a host beyond this machine without a key file."""
    beyond = [host for host in hosts if not is_loopback(host)]
    if beyond and not key_file:
        raise ConfigError(
            f"{name}: {beyond[0]} is reached over a network, which takes a --key-file on both sides (32 random bytes "
            f"that only their owner can read: openssl rand -hex 32 > FILE; chmod 600 FILE)"
        )


def check_security(level: str | None, key_file: str | None) -> None:
    """ConfigError for a level that does not exist, or that has no key file to rest on."""
    if level is not None and level not in SECURITY_LEVELS:
        raise ConfigError(f"security must be one of {', '.join(SECURITY_LEVELS)}, not {level!r}")
    if level is not None and not key_file:
        raise ConfigError(f"security: {level} rests on a secret that both sides hold: give --key-file as well")


def describe_security(level: str | None, key_file: str | None) -> str:
    """What protects connections to R-workers, for people."""
    if not key_file:
        return "loopback, not encrypted"
    return "authenticated, NOT encrypted" if level == "authenticate" else "CURVE, authenticated and encrypted"
