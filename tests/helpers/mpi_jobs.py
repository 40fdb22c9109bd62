"""MPI jobs for tests: real ones, under the mpirun of this environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastdecode.cli.launch import find_mpiexec, needed_environment
from helpers import r_workers
from helpers.forks import relayed

PATIENCE_SECONDS = 120
R_WORKER = [r_workers.FASTDECODE, "r-worker", "--transport", "mpi", *r_workers.SMALL]


def environment(**more: str) -> dict[str, str]:
    """More ranks than cores must be allowed, and the environment's own programs found."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    oversubscribe = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return os.environ | needed_environment() | oversubscribe | {"PATH": path} | more


def command(*segments: tuple[int, Sequence[str]]) -> list[str]:
    """mpirun with so many processes of each command, the S-worker's first; R-workers alone are no forks."""
    found = find_mpiexec()
    if found is None:
        raise RuntimeError("the environment has no mpirun; make installs it")
    words = [found.path]
    for index, (count, segment) in enumerate(segments):
        starts = segment if "r-worker" in segment else relayed(segment)
        words += [":"] * bool(index) + ["-n", str(count), *starts]
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


@dataclass(frozen=True)
class KilledJob:
    """A job of which a rank was killed: what it said from then on, and the processes it had, mpirun apart."""

    returncode: int
    output: str
    process_ids: list[int]


def kill_a_rank(words: Sequence[str], ready: str, victim: str) -> KilledJob:
    """Run mpirun as ``words`` say, and once it prints a line with ``ready``, ``kill -9`` the last rank with ``victim``
    among its words."""
    job = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while job.stdout and ready not in job.stdout.readline():
            assert job.poll() is None
        others = [each.pid for each in psutil.Process(job.pid).children(recursive=True)]
        os.kill(max(pid for pid in others if victim in psutil.Process(pid).cmdline()), signal.SIGKILL)
        output = "".join(job.communicate(timeout=PATIENCE_SECONDS))
    finally:
        job.kill()
        job.communicate()
    return KilledJob(job.returncode, output, others)
