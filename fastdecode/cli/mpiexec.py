"""The mpirun that belongs to this environment, and what it must be told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Without these Open MPI refuses to start anything as root."""

VERSION_SECONDS = 30


@dataclass(frozen=True)
class Mpiexec:
    """``kind``: "openmpi", "mpich" or "other"; ``version``: its first line about itself."""

    path: str
    kind: str
    version: str


def find_mpiexec() -> Mpiexec | None:
    """The one beside this Python, as a wheel brings it, else the one on PATH; None where there is none."""
    folder = Path(sys.executable).parent
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name, path=str(folder)) or shutil.which(name)
        if path:
            return describe_mpiexec(path)
    return None


def needed_environment() -> dict[str, str]:
    """Variables that mpirun needs here: for root, and nobody else."""
    return dict(ROOT_ENVIRONMENT) if os.geteuid() == 0 else {}


def describe_mpiexec(path: str) -> Mpiexec:
    """Ask the program what it is."""
    try:
        command = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
        lines = (command.stdout + command.stderr).strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    text = " ".join(lines)
    kind = "openmpi" if "Open MPI" in text or "prrte" in text.lower() else "other"
    if "HYDRA" in text or "MPICH" in text:
        kind = "mpich"
    return Mpiexec(path, kind, lines[0].strip() if lines else "")
