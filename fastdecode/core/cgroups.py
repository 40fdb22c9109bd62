"""Limits of control groups (cgroups), version 1 and 2: of this process's group and of all its parents.
The limit of any group on the path counts: a Slurm job's, a systemd slice's, a pod's. In a container, some groups on the
path may be invisible and are left out; the topmost visible group is the container's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self")
"""The default mount point of cgroups (``mountinfo`` may differ), and the folder where this process finds its own."""


def memory_limit() -> int | None:
    """Return the lowest memory limit of the cgroups in bytes; None if there is none."""
    limits = [limit for limit in map(_limit, _folders("memory")) if limit is not None]
    return min(limits, default=None)


def free_memory() -> int | None:
    """Return the bytes that this process may still allocate within every cgroup limit; None without a limit.
    Page cache counts as free, since it can be reclaimed.
    """
    rooms = []
    for folder in _folders("memory"):
        limit = _limit(folder)
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            rooms.append(max(0, limit - max(0, used - _reclaimable(folder))))
    return min(rooms, default=None)


def cpu_limit() -> float | None:
    """Return the lowest CPU quota in cores; None if there is none."""
    return min((cores for folder in _folders("cpu") if (cores := _cores(folder))), default=None)


def _limit(folder: Path) -> int | None:
    """Return the memory limit in bytes of the cgroup ``folder``; None without one.
    This is the lowest of its hard limit, its throttling limit, and limits of parents that are not visible.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    found = [_number(folder, name) for name in names] + [_stat(folder).get("hierarchical_memory_limit")]
    # cgroup version 1 writes a number near 2**63 if there is no limit
    unlimited = 1 << 60
    return min((limit for limit in found if limit is not None and limit < unlimited), default=None)


def _reclaimable(folder: Path) -> int:
    """Return the bytes of reclaimable page cache in the cgroup ``folder`` and the groups below it."""
    stat = _stat(folder)
    # Lines of memory.stat that count page cache, which the kernel reclaims before it refuses memory
    reclaimable = ("inactive_file", "active_file")
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in reclaimable)  # version 1 adds this prefix


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _cores(folder: Path) -> float | None:
    """Return the CPU quota of the cgroup ``folder`` in cores; None without a quota."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or not int(period) or not int(quota):
        return None  # "max" or -1: no quota
    return int(quota) / int(period)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the cgroup folders, from this process's group up to the root, that may limit ``controller``."""
    for mount, path in _groups(controller):
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for length in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:length])


def _groups(controller: str) -> Iterator[tuple[Path, str]]:
    """Yield each cgroup hierarchy that may limit ``controller``: its mount point, and this process's path in it."""
    paths = {"": ""}  # Paths by the controllers of cgroup version 1; the key "" is version 2
    for line in _read(PROCESS / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths[controllers] = path
    mounts = _mounts()
    for controllers, path in paths.items():
        if not controllers:
            for mount in dict.fromkeys((ROOT, ROOT / "unified", *mounts.get("", ()))):
                yield mount, path
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((ROOT / controller, ROOT / controllers, *mounts.get(controller, ()))):
                yield mount, path
    if not any(controller in controllers.split(",") for controllers in paths):
        yield ROOT / controller, ""


def _mounts() -> dict[str, list[Path]]:
    """Return the folders where cgroup hierarchies are mounted, by controller; "" is the key of version 2."""
    found: dict[str, list[Path]] = {}
    for line in _read(PROCESS / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ") if after else ("", "")
        place = Path(before.split(" ")[4].replace("\\040", " ")) if kind.startswith("cgroup") else None
        if place is not None:
            for name in ("",) if kind == "cgroup2" else options.split(","):
                found.setdefault(name, []).append(place)
    return found


def _number(folder: Path, *names: str) -> int | None:
    """Return the first number that one of the files ``names`` in ``folder`` holds; None if none of them does."""
    for name in names:
        if (text := _read(folder / name)).isdigit():
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
