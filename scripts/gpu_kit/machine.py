"""Describes the machine for the report."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "fastdecode",
    "torch",
    "transformers",
    "triton",
    "torchao",
    "compressed-tensors",
    "gptqmodel",
    "kernels",
    "vllm",
)


def machine() -> dict[str, Any]:
    """Return the machine's hardware and installed packages."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": first_lines("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
    }


def cpu_name() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def first_lines(*command: str) -> str:
    """Return what a program prints; "" if it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def version_of(package: str) -> str:
    """Return a package's version; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
