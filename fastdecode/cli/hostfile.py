"""Hostfiles, as Open MPI reads them: ``host slots=N`` per line, and comments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdecode.errors import ConfigError

MOST_SLOTS = 4096
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\s+slots\s*=\s*(\d{1,5}))?")


@dataclass(frozen=True)
class HostSlots:
    """A host and how many of the job's processes it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name} slots={self.slots}"


def read_hostfile(path: str) -> list[HostSlots]:
    """Its hosts in order; ConfigError with one sentence per bad line."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    hosts: list[HostSlots] = []
    problems: list[str] = []
    for number, line in _lines(text):
        try:
            host = _host(line)
            if host.name in {each.name for each in hosts}:
                raise ConfigError(f"{host.name} was named before; give it all its slots at once")
            hosts.append(host)
        except ConfigError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise ConfigError("hostfile: " + "; ".join(problems))
    if not hosts:
        raise ConfigError(f"hostfile: {path} names no host; a line is such as `node1 slots=2`")
    return hosts


def split_roles(hosts: Sequence[HostSlots]) -> tuple[str, tuple[HostSlots, ...]]:
    """The S-worker's host, which is the first and gives it one slot, and those of the R-workers."""
    first, *others = hosts
    left = [HostSlots(first.name, first.slots - 1)] if first.slots > 1 else []
    if not left and not others:
        raise ConfigError(f"hostfile: {first.name} has one slot, which the S-worker takes: add hosts for R-workers")
    return first.name, (*left, *others)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if stripped := line.partition("#")[0].strip():
            yield number, stripped


def _host(line: str) -> HostSlots:
    match = _LINE.fullmatch(line)
    if not match:
        raise ConfigError(f"a line is a host and its slots, such as `node1 slots=2`, not {line!r:.80}")
    slots = int(match.group(2) or 1)
    if not 1 <= slots <= MOST_SLOTS:
        raise ConfigError(f"slots must be 1 to {MOST_SLOTS}, not {slots}")
    return HostSlots(match.group(1), slots)
