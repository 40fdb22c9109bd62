"""``fastdecode doctor`` finds what is there, and gives a cure for each thing that is broken."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import mpi_jobs, r_workers

from fastdecode.cli.doctor import LIBRARY_CODE, check_mpi, check_port
from fastdecode.cli.doctor_parking import check_parking
from fastdecode.cli.launch import describe_mpiexec
from fastdecode.cli.main import main

pytestmark = pytest.mark.slow


def test_this_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["doctor", "--port", str(port)]) == 0
    text = capsys.readouterr().out
    for what in (
        "cores: ",
        "memory: ",
        "memory lock: ",
        "instruction set scalar: ",
        "mpi4py: Open MPI",
        "mpirun: ",
        "the same MPI",
        f"port {port}: free",
    ):
        assert what in text
    assert "BROKEN" not in text


def test_a_folder_for_parked_sessions_is_measured(tmp_path: Path) -> None:
    [finding] = check_parking(str(tmp_path))
    pattern = r"park_dir .*: 0 chains of 0\.00 GiB, .* GiB free; written with [\d,]+ MB/s .*, read with [\d,]+ MB/s"
    assert finding.level == "ok" and re.fullmatch(pattern, finding.what) and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for wrong in ("none", "file"):
        assert [each.level for each in check_parking(str(tmp_path / wrong))] == ["broken"]


def test_listening_r_workers_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with r_workers.listening() as (_, address):
        assert main(["doctor", "--r-workers", address]) == 0
    found = re.search(
        rf"R-worker {address}: 1 thread\(s\), .* round trip (\d+) µs, link (\d+\.\d+) GB/s", capsys.readouterr().out
    )
    assert found and 0 < int(found.group(1)) < 10**6 and float(found.group(2)) > 0


def test_an_r_worker_that_does_not_answer_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdecode.cluster.pool.remote.OPEN_SECONDS", 0.3)
    assert main(["doctor", "--r-workers", "127.0.0.1:9"]) == 1
    text = capsys.readouterr().out
    assert "BROKEN R-worker 127.0.0.1:9 is lost" in text and "→ is `fastdecode r-worker --listen` running there" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--r-workers", "mpi"], "doctor measures R-workers at host:port"),
        (["--r-workers", "10.0.0.1:5580"], "takes a --key-file on both sides"),
        (["--port", "0"], "port must be 1 to 65535"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_port_in_use_is_noted() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        finding = check_port(taken.getsockname()[1])
    assert finding.level == "note" and "Address already in use" in finding.what and finding.cure


def test_another_mpirun_than_mpi4pys_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpirun of MPICH beside a Python that loads Open MPI is found."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho HYDRA build details:\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr("fastdecode.cli.doctor.find_mpiexec", lambda: describe_mpiexec(str(mpirun)))
    broken = [finding for finding in check_mpi() if finding.level == "broken"]
    assert len(broken) == 1 and "mpirun belongs to mpich and mpi4py loads openmpi" in broken[0].what and broken[0].cure


def test_a_job_of_one_rank_is_noted() -> None:
    doctor = [r_workers.FASTDECODE, "doctor", "--port", "1"]
    assert "world size: this job has one rank" in mpi_jobs.run((1, doctor)).stdout
    assert "world size: 2" in mpi_jobs.run((2, doctor)).stdout
    assert "world size" not in subprocess.run(doctor, capture_output=True, text=True, check=False).stdout


def test_the_library_is_named_without_starting_mpi() -> None:
    """A lone process that starts MPI would leave shared memory behind."""
    code = LIBRARY_CODE + "; print(MPI.Is_initialized())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "MPI" in run.stdout.splitlines()[0] and run.stdout.splitlines()[1] == "False"
