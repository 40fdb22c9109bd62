"""``--r-workers mpi``: the contract and the engine under a real mpirun, and the end of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import mpi_jobs, r_workers
from helpers.examples import thinned
from helpers.forks import true_starts
from helpers.processes import TESTS, alive, script

from fastdecode.core.machine import mend_binding, usable_cores

PYTHON = sys.executable
BENCH = [r_workers.FASTDECODE, "bench", "throughput", "--r-workers", "mpi", "--max-model-len", "128"]
BENCH += ["--num-prompts", "4", "--random-input-len", "16", "--random-output-len", "8", "--max-num-seqs", "8"]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("mpi_segments")]


def test_the_contract_of_backends_holds(mpi_segments: Path) -> None:
    """The first rank runs every transport's tests, and then the R-workers end by themselves."""
    tests = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "test_backends.py")]
    tests += [f"{TESTS / 'test_kv_port.py'}::test_stored_rows_are_appended_rows"]
    job = mpi_jobs.run((1, tests), (2, mpi_jobs.R_WORKER), FASTDECODE_TEST_BACKENDS="mpi")
    assert job.returncode == 0, job.stdout + job.stderr
    assert " passed" in job.stdout and "failed" not in job.stdout
    assert "MPI rank 1, cores" in job.stdout and "MPI rank 2, cores" in job.stdout
    assert list(mpi_segments.iterdir()) == []


def test_a_killed_rank_ends_the_job(mpi_segments: Path) -> None:
    """After kill -9 in a step the status is not zero, the error names the rank, and nothing is left."""
    s_worker = script("""
        import time
        from fastdecode.cluster.pool.mpi import MpiBackend
        from helpers import contract
        backend = MpiBackend(contract.BLOCK_SIZE)
        backend.open(contract.LAYOUT)
        contract.run(backend, contract.FIRST)
        backend.begin_step(contract.plan([([(9, 0, 50, 1)], [])]))
        print("in a step", flush=True)
        time.sleep(1000)
    """)
    command = mpi_jobs.command((1, s_worker), (2, mpi_jobs.R_WORKER))
    job = mpi_jobs.kill_a_rank(command, "in a step", "r-worker")
    assert job.returncode != 0
    assert "rank 2" in job.output
    while any(alive(pid) for pid in job.process_ids):  # mpirun may end before the processes that it has told to end.
        time.sleep(0.01)
    assert list(mpi_segments.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-flag"], "unrecognized arguments"),
        (["--schedule", "sls", "--max-num-seqs", "0"], "max_num_seqs must be a whole number"),
        # The next case shows this, too.
        pytest.param(["--model", "/no/such/folder"], "no such folder", marks=pytest.mark.thorough),
    ],
)
def test_an_s_worker_that_fails_takes_the_r_workers_with_it(arguments: list[str], message: str) -> None:
    """The S-worker fails before and after it joins the job; the R-workers, which would wait for ever, end too."""
    job = mpi_jobs.run((1, [*BENCH, *arguments]), (2, mpi_jobs.R_WORKER))
    assert job.returncode != 0 and message in job.stderr


@pytest.mark.thorough  # The test of one that fails shows this, too.
def test_an_s_worker_that_does_not_close_takes_the_r_workers_with_it() -> None:
    """The program raises in a step and cleans up nothing."""
    s_worker = script("""
        from fastdecode.cluster.pool.mpi import MpiBackend
        from helpers import contract
        backend = MpiBackend(contract.BLOCK_SIZE)
        backend.open(contract.LAYOUT)
        backend.begin_step(contract.plan([([(9, 0, 50, 1)], [])]))
        raise RuntimeError("out of ideas")
    """)
    job = mpi_jobs.run((1, s_worker), (2, mpi_jobs.R_WORKER))
    assert job.returncode != 0 and "out of ideas" in job.stderr


@pytest.mark.thorough  # The test of a killed rank shows this, too.
def test_an_r_worker_that_fails_ends_the_job() -> None:
    """The R-worker fails in its arguments, and in a step."""
    job = mpi_jobs.run((1, BENCH), (1, mpi_jobs.R_WORKER), (1, [*mpi_jobs.R_WORKER, "--cores", "9999"]))
    assert job.returncode != 0 and "cores: this process may not use [9999]" in job.stderr
    failing = script("""
        from fastdecode.cluster.r_worker.session import Session
        def fail(self, frame):
            raise RuntimeError("a worn-out R-worker")
        Session._end = fail
        from fastdecode.cli.main import main
        main(["r-worker", "--transport", "mpi", "--kv-cache-memory", "64MiB", "--threads", "1"])
    """)
    job = mpi_jobs.run((1, BENCH), (1, mpi_jobs.R_WORKER), (1, failing))
    assert job.returncode != 0
    assert "MPI rank 2: this R-worker failed: RuntimeError: a worn-out R-worker" in job.stderr


@pytest.mark.parametrize("command", thinned([BENCH, mpi_jobs.R_WORKER], 2), ids=["s-worker", "r-worker"])
def test_a_process_alone_is_told_how(command: list[str]) -> None:
    """The error says how to start a job, with and without mpirun."""
    for job in (mpi_jobs.run((1, command)), subprocess.run(command, capture_output=True, text=True, check=False)):
        assert job.returncode == 2
        assert "this process is alone" in job.stderr
        assert ": mpirun -n 1 fastdecode bench throughput --r-workers mpi … : -n 4 fastdecode r-worker" in job.stderr


@pytest.mark.parametrize("command", [BENCH, mpi_jobs.R_WORKER], ids=["s-worker", "r-worker"])
def test_a_process_alone_leaves_no_shared_memory(command: list[str], mpi_segments: Path) -> None:
    """Open MPI's shared memory for ranks of one machine would lie in this folder."""
    plain = [PYTHON, "-c", "from mpi4py import MPI"]
    job = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "this process is alone" in job.stderr and list(mpi_segments.iterdir()) == []
    subprocess.run(plain, check=True)
    assert len(list(mpi_segments.iterdir())) == 1  # Otherwise this test would look in the wrong place.


def test_ranks_in_the_wrong_order_are_told() -> None:
    job = mpi_jobs.run((1, mpi_jobs.R_WORKER), (1, BENCH))
    assert job.returncode != 0
    assert "the first rank is the S-worker's" in job.stderr or "two S-workers in one job" in job.stderr


def test_the_benchmark_runs_and_a_binding_to_one_core_is_mended(tmp_path: Path) -> None:
    """The job ends with 0, and Open MPI's own binding of two ranks to one core each is undone, and only that."""
    job = mpi_jobs.run((1, [PYTHON, "-S", "-c", "import os; print('before', len(os.sched_getaffinity(0)))"]))
    bound = "before 1" in job.stdout and len(usable_cores()) > 1
    result = tmp_path / "result.json"
    job = mpi_jobs.run((1, [*BENCH, "--output-json", str(result)]), (1, mpi_jobs.R_WORKER))
    assert job.returncode == 0, job.stdout + job.stderr
    assert "1 R-worker(s) of 1 thread(s)" in job.stdout
    assert json.loads(result.read_text())["total_output_tokens"] == 4 * 8
    assert ("mpirun bound this process to core" in job.stderr) == bound
    every = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(every)})
        assert mend_binding({"OMPI_COMM_WORLD_SIZE": "3"}) == mend_binding({}) == ""
        assert os.sched_getaffinity(0) == {min(every)}
        assert len(every) == 1 or "to core" in mend_binding({"OMPI_COMM_WORLD_SIZE": "2"})
        assert os.sched_getaffinity(0) >= every
    finally:
        os.sched_setaffinity(0, every)


@pytest.mark.thorough  # test_r_worker.py tests the same over TCP.
def test_an_r_worker_never_imports_torch() -> None:
    """torch is not imported even after a session."""
    r_worker = script("""
        from fastdecode.cli.main import main
        status = main(["r-worker", "--transport", "mpi", "--kv-cache-memory", "64MiB", "--threads", "1"])
        print("found", status, sorted({"torch", "transformers", "greenlet", "zmq"} & set(sys.modules)))
    """)
    s_worker = script("""
        import numpy as np
        from fastdecode.cluster.pool.mpi import MpiBackend
        from fastdecode.kinds import Dense
        from fastdecode.kinds.layout import KVLayout
        backend = MpiBackend(16)
        print(backend.open(KVLayout((Dense(1, 1, 8, 8, 1.0),), "float32", "float32")))
        backend.close()
    """)
    with true_starts():
        job = mpi_jobs.run((1, s_worker), (1, r_worker))
    assert "found 0 []" in job.stdout, job.stdout + job.stderr
