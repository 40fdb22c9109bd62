"""Real MPI jobs for tests, under the mpirun of this environment."""

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
from helpers.processes import PATIENCE_SECONDS

R_WORKER = [r_workers.FASTDECODE, "r-worker", "--transport", "mpi", *r_workers.SMALL]


def environment(**more: str) -> dict[str, str]:
    """Return an environment that allows more ranks than cores and finds this environment's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    oversubscribe = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return os.environ | needed_environment() | oversubscribe | {"PATH": path} | more


def command(*segments: tuple[int, Sequence[str]]) -> list[str]:
    """Return an mpirun command with this many processes of each command, the S-worker's first.
    Commands of R-workers alone are not forks.
    """
    found = find_mpiexec()
    if found is None:
        raise RuntimeError("the environment has no mpirun; make installs it")
    words = [found.path]
    for index, (count, segment) in enumerate(segments):
        starts = segment if "r-worker" in segment else relayed(segment)
        words += [":"] * bool(index) + ["-n", str(count), *starts]
    return words


def run(*segments: tuple[int, Sequence[str]], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a job and return it once it has finished."""
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
    """A job after one of its ranks was killed: its later output, and its processes except mpirun."""

    returncode: int
    output: str
    process_ids: list[int]


def kill_a_rank(words: Sequence[str], ready: str, victim: str) -> KilledJob:
    """Run the mpirun command ``words``; kill the last rank with ``victim`` in its words.
    The rank is killed once a line with ``ready`` is printed.
    """
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
