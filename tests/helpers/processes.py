"""Processes that tests start, and what they leave behind."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1]


def script(code: str) -> list[str]:
    """The command of a Python process that does this, beside the tests' own helpers."""
    return [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n" + textwrap.dedent(code)]


def alive(pid: int) -> bool:
    """False for a zombie, too, which its parent, here init, has not reaped yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_of(parent: int, word: str) -> list[int]:
    """Processes that ``parent`` started with ``word`` in their command line, by age."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return sorted(found)


def segments_of(pids: Iterable[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped: theirs, whatever else runs on this machine."""
    mapped = {region.path for pid in pids for region in psutil.Process(pid).memory_maps()}
    return {Path(path) for path in mapped if path.startswith("/dev/shm/")}
