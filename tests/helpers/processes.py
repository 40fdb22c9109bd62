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


def segments_of(pids: Iterable[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped: theirs, whatever else runs on this machine."""
    mapped = {region.path for pid in pids for region in psutil.Process(pid).memory_maps()}
    return {Path(path) for path in mapped if path.startswith("/dev/shm/")}
