"""What this process may use of the machine: cores by affinity and cgroup, memory by cgroup and what is free."""

from __future__ import annotations

import os
import platform
from pathlib import Path

KV_CACHE_SHARE = 0.40
"""Part of the free memory that the R-workers on a machine take together by default."""


def usable_cores() -> list[int]:
    """Core numbers in this process's affinity mask, cut to the cgroup's CPU quota where one is set."""
    cores = sorted(os.sched_getaffinity(0))
    quota = _cgroup_value("cpu.max")
    if quota and quota.split()[0] != "max":
        limit, period = (int(part) for part in quota.split())
        cores = cores[: max(1, -(-limit // period))]
    return cores


def available_memory_bytes() -> int:
    """Bytes that can still be allocated without swapping, within the cgroup's limit."""
    available = _meminfo_bytes("MemAvailable")
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit and limit != "max" and used:
        available = min(available, int(limit) - int(used))
    return max(available, 0)


def total_memory_bytes() -> int:
    """Bytes of memory this process could ever have."""
    limit = _cgroup_value("memory.max")
    total = _meminfo_bytes("MemTotal")
    return min(total, int(limit)) if limit and limit != "max" else total


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_identity() -> str:
    """The same for all processors of one kind, in letters, digits and dashes: vendor, family, model and stepping."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    names = ("vendor_id", "cpu family", "model", "stepping")
    return "-".join(fields[name] for name in names if name in fields) or platform.machine()


def _meminfo_bytes(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_value(name: str) -> str:
    """A cgroup v2 setting of this process's own group, or of the root it sees; empty where there is none."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        own = ""
    for folder in (Path("/sys/fs/cgroup") / own, Path("/sys/fs/cgroup")):
        try:
            return (folder / name).read_text().strip()
        except OSError:
            continue
    return ""
