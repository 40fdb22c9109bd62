"""MPI jobs for tests: real ones, under the mpirun of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdecode.cli.launch import find_mpiexec, needed_environment
from helpers import r_workers

PATIENCE_SECONDS = 120
R_WORKER = [r_workers.FASTDECODE, "r-worker", "--transport", "mpi", *r_workers.SMALL]


def environment(**more: str) -> dict[str, str]:
    """More ranks than cores must be allowed, and the environment's own programs found."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    oversubscribe = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return os.environ | needed_environment() | oversubscribe | {"PATH": path} | more


def command(*segments: tuple[int, Sequence[str]]) -> list[str]:
    """mpirun with so many processes of each command, the S-worker's first."""
    found = find_mpiexec()
    if found is None:
        raise RuntimeError("the environment has no mpirun; make installs it")
    words = [found.path]
    for index, (count, segment) in enumerate(segments):
        words += [":"] * bool(index) + ["-n", str(count), *segment]
    return words


def run(*segments: tuple[int, Sequence[str]], **more: str) -> subprocess.CompletedProcess[str]:
    """The finished job."""
    return subprocess.run(
        command(*segments),
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
