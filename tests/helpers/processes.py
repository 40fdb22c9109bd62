"""Processes that tests start, and what they leave behind."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1]

PATIENCE_SECONDS = 240
"""Seconds for which a test waits for another process: less than pytest's limit for the whole test.

What the process does takes a small part of it, unless other processes keep all cores busy.
"""


def script(code: str) -> list[str]:
    """Return the command of a Python process that runs ``code`` and can import the tests' helpers."""
    return [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n" + textwrap.dedent(code)]


def alive(pid: int) -> bool:
    """Return whether process ``pid`` runs; False for a zombie that its parent has not reaped yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_of(parent: int, word: str) -> list[int]:
    """Return the processes that ``parent`` started with ``word`` in their command line, oldest first."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return sorted(found)


def segments_of(pids: Iterable[int]) -> set[Path]:
    """Return the shared-memory files that these processes have mapped."""
    mapped = {region.path for pid in pids for region in psutil.Process(pid).memory_maps()}
    return {Path(path) for path in mapped if path.startswith("/dev/shm/")}
