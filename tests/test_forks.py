"""Processes that tests fork instead of starting them behave as any other child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import r_workers
from helpers.forks import FASTDECODE, module_of, relayed, true_starts
from helpers.processes import alive


def test_only_commands_of_the_product_are_forked() -> None:
    assert module_of([FASTDECODE, "r-worker"]) == ("fastdecode.cli.main", ["r-worker"])
    rank = [sys.executable, "-m", "fastdecode.tensor_parallel.process", "{}"]
    assert module_of(rank) == ("fastdecode.tensor_parallel.process", ["{}"])
    for other in (["mpirun", FASTDECODE], [sys.executable, "-c", "1"], [sys.executable, "-m", "pytest"], "ls", []):
        assert module_of(other) is None


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=str
)
def test_a_fork_is_a_child_that_signals_end(number: int, status: int) -> None:
    """A fork has the given arguments, none of our open files, and its own status."""
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    with r_workers.listening() as (process, _):
        place = Path("/proc", str(process.pid))
        assert process.pid in map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
        words = (place / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert words[1:4] == [b"r-worker", b"--kv-cache-memory", b"64MiB"]
        assert "/dev/zero" not in [str(file.readlink()) for file in (place / "fd").iterdir()]
        assert "torch" not in (place / "maps").read_text(), "R-workers never import it"
        process.send_signal(number)
        assert process.wait() == status
    os.close(descriptor)


def test_environment_and_folder_are_those_asked_for(tmp_path: Path) -> None:
    environment = os.environ | {"FASTDECODE_ISA": "mmx", "FASTDECODE_FORKED": "yes"}
    command = [FASTDECODE, "r-worker", *r_workers.SMALL, "--listen", "tcp://127.0.0.1:0"]
    refused = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "FASTDECODE_ISA: this machine supports" in refused.stderr
    key = subprocess.run([*command, "--key-file", "no-key"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert key.returncode == 2 and "no-key" in key.stderr


@pytest.mark.slow
def test_a_relay_is_as_its_fork(tmp_path: Path) -> None:
    """A relay has its fork's files, environment, folder, and status or signal, and neither outlives the other."""
    code = "import os, sys, time; print(os.getpid(), os.environ['OURS'], os.getcwd(), flush=True)\n"
    environment = os.environ | {"OURS": "here"}

    def start(then: str) -> tuple[subprocess.Popen[str], int]:
        command = relayed([sys.executable, "-c", code + then])
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        fork, *rest = process.stdout.readline().split() if process.stdout else ()
        assert rest == ["here", str(tmp_path)] and int(fork) != process.pid
        return process, int(fork)

    assert start("sys.exit(7)")[0].wait() == 7
    assert start("os.kill(os.getpid(), 9)")[0].wait() == -signal.SIGKILL
    for number in (signal.SIGTERM, signal.SIGKILL):
        process, fork = start("time.sleep(600)")
        process.send_signal(number)
        assert process.wait() == -number
        while alive(fork):
            time.sleep(0.01)


@pytest.mark.thorough
def test_what_is_started_from_nothing_does_the_same() -> None:
    """An S-worker and its R-worker work without forks, as a fork's own processes and test_mpi*.py always do."""
    command = [FASTDECODE, "generate", "def main():", "--max-tokens", "8", "--temperature", "0", "--device", "cpu"]
    command += ["--r-workers", "spawn:1", "--kv-cache-memory", "16MiB"]
    with true_starts():
        started = subprocess.run(command, capture_output=True, text=True, check=False)
    forked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr
    assert (forked.returncode, forked.stdout) == (0, started.stdout) and len(started.stdout) > 12
