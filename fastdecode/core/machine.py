"""The machine's resources that this process may use: cores by affinity, cgroup and launcher; free memory."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from fastdecode.core import cgroups

KV_CACHE_SHARE = 0.40
"""Share of the free memory that all R-workers of a machine together use for KV cache by default."""

SCRATCH_SHARE = 1 / 8
"""Share of the free memory that the S-worker uses for prompts in progress by default."""

STATE_SHARE = 0.40
"""Share of the free memory that the S-worker uses for recurrent states by default, after its model is loaded."""

DRAFT_CACHE_SHARE = 1 / 8
"""Share of the free memory that is used for the KV cache of a draft model."""

CAN_BIND = hasattr(os, "sched_setaffinity")
"""True if this system binds processes to cores: Linux does, macOS does not."""


def allowed_cores() -> set[int]:
    """Return the core numbers in this process's affinity mask; all cores if the system has no such masks."""
    return set(os.sched_getaffinity(0)) if CAN_BIND else set(range(os.cpu_count() or 1))


def force_to_disk(descriptor: int) -> None:
    """Wait until all data written to the file ``descriptor`` is on the disk, with metadata if the system needs it."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def advise_cache(descriptor: int, advice: str) -> None:
    """Tell the page cache how the file ``descriptor`` will be read; do nothing on systems without such advice.
    ``advice``: the name of a POSIX_FADV_ constant without this prefix.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, getattr(os, f"POSIX_FADV_{advice}"))


def usable_cores() -> list[int]:
    """Return the ``allowed_cores`` in ascending order, cut to the number that the cgroup's CPU quota allows."""
    cores = sorted(allowed_cores())
    limit = cgroups.cpu_limit()
    return cores if limit is None else cores[: max(1, math.ceil(limit))]


def has_cpu_quota() -> bool:
    """Return whether a cgroup limits this process to less processor time than its cores have."""
    return len(usable_cores()) < len(allowed_cores())


def numa_nodes() -> list[list[int]]:
    """Return the cores that this process may use, by NUMA node; one list if the kernel reports no nodes."""
    usable = set(usable_cores())
    found = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda each: int(each.name[4:])):
        ranges = (folder / "cpulist").read_text().strip()
        ends = [part.split("-") for part in ranges.split(",") if part]
        cores = sorted(usable & {core for pair in ends for core in range(int(pair[0]), int(pair[-1]) + 1)})
        if cores:
            found.append(cores)
    return found or [sorted(usable)]


def available_memory_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the cgroup's limit.

    This is half of all memory if the kernel does not report free memory.
    """
    available = _meminfo_bytes("MemAvailable") or total_memory_bytes() // 2
    within = cgroups.free_memory()
    return available if within is None else min(available, within)


def total_memory_bytes() -> int:
    """Return the bytes of the machine's memory, or the cgroup's memory limit if that is lower."""
    limit = cgroups.memory_limit()
    total = _meminfo_bytes("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total if limit is None else min(total, limit)


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_identity() -> str:
    """Return an id of the processor's kind: vendor, family, model and stepping in letters, digits and dashes."""
    fields: dict[str, str] = {}
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    # Fields of /proc/cpuinfo that identify a kind of processor: four on x86, four on ARM
    kind_fields = (
        "vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU variant", "CPU part", "CPU revision",
    )  # fmt: skip
    return "-".join(fields[name] for name in kind_fields if name in fields) or platform.machine()


def _meminfo_bytes(key: str) -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def mend_binding(environment: Mapping[str, str] = os.environ) -> str:
    """Undo Open MPI's binding of this process to a single core, if it may use more; return a sentence for the log.
    Ranks of larger jobs, and ranks that a user bound to several cores, stay as they are; the sentence is then "".
    """
    bound = allowed_cores()
    if len(bound) > 1 or not is_trapped(environment):
        return ""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel cuts this to the cores that the cgroup allows
    cores = usable_cores()
    if len(cores) == 1:
        os.sched_setaffinity(0, bound)
        return ""
    return (
        f"mpirun bound this process to core {min(bound)} alone, as Open MPI does with jobs of one or two ranks; it now "
        f"uses {len(cores)} cores (say which with --cores or --s-cores, or give mpirun --bind-to none)"
    )


def is_trapped(environment: Mapping[str, str]) -> bool:
    """Return whether the MPI job in ``environment`` is so small that Open MPI binds each of its ranks to one core."""
    size = environment.get("OMPI_COMM_WORLD_SIZE", "")
    # Open MPI binds the ranks of a job of at most this many to one core each, and those of larger jobs to a NUMA node
    most_ranks = 2
    return size.isdigit() and int(size) <= most_ranks


def return_free_memory() -> None:
    """Give freed memory back to the system, which glibc would keep; do nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def host_id() -> str:
    """Return an id that all processes of one boot of a machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()


def own_address() -> str:
    """Return this machine's address on its default route; 127.0.0.1 if it has none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737), to which nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def process_name() -> str:
    """Return this process as "host:pid"."""
    return f"{socket.gethostname()}:{os.getpid()}"
