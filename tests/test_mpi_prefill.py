"""``--prefill-workers mpi:N`` under a real mpirun: the same tokens, an orderly end, and one line for each mistake."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from helpers import model_zoo, mpi_jobs, r_workers
from helpers.processes import script

NAME = "llama-gqa"
BENCH = [r_workers.FASTDECODE, "bench", "throughput", "--max-model-len", "128", "--num-prompts", "4"]
BENCH += ["--random-input-len", "16", "--random-output-len", "8", "--max-num-seqs", "8"]
RANKED = [*BENCH, "--r-workers", "mpi"]
SPAWNED = [*BENCH, "--r-workers", "spawn:1", "--kv-cache-memory", "64MiB", "--r-threads", "1"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("mpi_segments")]


def prefill_worker(model: str, *flags: str) -> list[str]:
    command = [r_workers.FASTDECODE, "prefill-worker", "--transport", "mpi", "--model", model, "--threads", "1"]
    return [*command, "--device", "cpu", "--max-model-len", "512", *flags]


NUM_TOKENS = 16
NO_MODEL = prefill_worker("/no/such/folder")
"""A command for jobs that end before their prefill workers load anything."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("llama"))


APART = "import os; from fastdecode.cluster.links import mpi_job; mpi_job.host_id = lambda: str(os.getpid())"
"""A rank's first line, which makes it believe that no other rank is on its machine."""


def s_worker(folder: Path, settings: dict[str, object], num_engines: int, first: str = "") -> list[str]:
    """Return the command of engines, one after another, that print tokens.

    Their prompts go to prefill workers 0 and 1 in random parts.
    """
    return script(f"""
        {first}
        import json
        from helpers import model_zoo
        from helpers.engine_checks import assert_nothing_held
        from helpers.prefill_workers import AnyParts
        from fastdecode import LLM, SamplingParams
        greedy = SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, ignore_eos=True, detokenize=False)
        settings = dict(device="cpu", skip_tokenizer_init=True, max_model_len=512, s_threads=1, **{settings!r})
        prompts = [{{"prompt_token_ids": each}} for each in model_zoo.prompts({NAME!r})]
        for seed in range({num_engines}):
            with LLM({str(folder)!r}, **settings) as llm:
                policy = llm.engine.scheduler.remote_prompts.policy = AnyParts([0, 1], seed=seed, sizes=(1, 2))
                outputs = llm.generate(prompts, greedy, use_tqdm=False)
                assert_nothing_held(llm.engine)
                assert len(policy.started_jobs) == len(prompts)
            print("tokens", json.dumps([list(each.outputs[0].token_ids) for each in outputs]), flush=True)
    """)


def check(job: subprocess.CompletedProcess[str], num_engines: int) -> None:
    """Assert that the job ended by itself, with the tokens of ``transformers`` from each engine."""
    assert job.returncode == 0, job.stdout + job.stderr
    found = [json.loads(line.removeprefix("tokens ")) for line in job.stdout.splitlines() if line.startswith("tokens")]
    assert found == [[list(tokens[:NUM_TOKENS]) for tokens in model_zoo.reference(NAME).tokens]] * num_engines


def test_ranks_of_every_kind(folder: Path, mpi_segments: Path) -> None:
    """R-workers and prefill workers come in any order, and all end by themselves with 0."""
    settings = {"r_workers": "mpi", "prefill_workers": "mpi:2"}
    ranks = (1, prefill_worker(str(folder))), (1, mpi_jobs.R_WORKER), (1, prefill_worker(str(folder)))
    job = mpi_jobs.run((1, s_worker(folder, settings, 2)), *ranks)
    check(job, 2)
    for rank in (1, 3):
        assert f"fastdecode prefill-worker: MPI rank {rank}, tcp://127.0.0.1:" in job.stdout
    assert list(mpi_segments.iterdir()) == []


def test_prefill_workers_alone_as_on_two_machines(folder: Path, tmp_path: Path) -> None:
    """R-workers are spawned, and ranks that believe to be on different machines use a key and a network address."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    key.chmod(0o600)
    settings = {"r_workers": "spawn:1", "kv_cache_memory": "64MiB", "r_threads": 1, "prefill_workers": "mpi:2"}
    flags = prefill_worker(str(folder), "--key-file", str(key))[1:]
    ranks = script(f"{APART}; from fastdecode.cli.main import main; main({flags!r})")
    job = mpi_jobs.run((1, s_worker(folder, settings | {"key_file": str(key)}, 1, APART)), (2, ranks))
    check(job, 1)
    assert "MPI rank 2, tcp://" in job.stdout and "tcp://127.0.0.1" not in job.stdout


@pytest.mark.thorough  # test_launch.py tests the same through launch.
def test_the_benchmark_ends_with_0(folder: Path) -> None:
    flags = ["--model", str(folder), "--device", "cpu", "--skip-tokenizer-init", "--prefill-workers", "mpi:1"]
    job = mpi_jobs.run((1, [*SPAWNED, *flags]), (1, prefill_worker(str(folder))))
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize(
    ("command", "ranks", "message"),
    [
        ([*RANKED, "--prefill-workers", "mpi:3"], [mpi_jobs.R_WORKER, NO_MODEL], "mpi:3: this job has 1 rank(s) of"),
        pytest.param(
            [*SPAWNED, "--prefill-workers", "mpi:1"],
            [mpi_jobs.R_WORKER, NO_MODEL],
            "give the S-worker --r-workers mpi",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            RANKED,
            [mpi_jobs.R_WORKER, NO_MODEL],
            "give the S-worker --prefill-workers mpi:1",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            [*RANKED, "--prefill-workers", "mpi:1"],
            [NO_MODEL],
            "no rank of this job is an R-worker",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_ranks_that_are_not_those_wanted(command: list[str], ranks: list[list[str]], message: str) -> None:
    """There is one error, before any model is loaded."""
    job = mpi_jobs.run((1, command), *((1, each) for each in ranks))
    assert job.returncode == 2, job.stdout + job.stderr
    errors = [line for line in job.stderr.splitlines() if line.startswith("fastdecode: error:")]
    assert len(errors) == 1 and message in errors[0] and "no such folder" not in job.stderr


@pytest.mark.parametrize("command", [[*SPAWNED, "--prefill-workers", "mpi:1"], NO_MODEL], ids=["s-worker", "prefill"])
def test_a_process_alone_is_told_how(command: list[str]) -> None:
    """The error says how to start a job, with and without mpirun."""
    for job in (mpi_jobs.run((1, command)), subprocess.run(command, capture_output=True, text=True, check=False)):
        assert job.returncode == 2
        assert "this process is alone" in job.stderr and ": mpirun -n 1 fastdecode bench throughput" in job.stderr


def test_the_first_rank_is_the_s_workers() -> None:
    job = mpi_jobs.run((1, NO_MODEL), (1, mpi_jobs.R_WORKER))
    assert job.returncode != 0
    assert "the first rank is the S-worker's, and this is a prefill worker" in job.stderr


def test_a_prefill_worker_that_fails_ends_the_job(folder: Path) -> None:
    flags = ["--model", str(folder), "--device", "cpu", "--skip-tokenizer-init", "--prefill-workers", "mpi:1"]
    job = mpi_jobs.run((1, [*SPAWNED, *flags]), (1, NO_MODEL))
    assert job.returncode != 0
    assert "error: MPI rank 1: this prefill worker: cannot load '/no/such/folder': no such folder" in job.stderr


def test_a_killed_prefill_worker_ends_the_job(folder: Path) -> None:
    """mpirun ends the other ranks, as it does after a killed R-worker."""
    flags = ["--model", str(folder), "--device", "cpu", "--skip-tokenizer-init", "--prefill-workers", "mpi:1"]
    command = mpi_jobs.command((1, [*SPAWNED, *flags]), (1, prefill_worker(str(folder))))
    job = mpi_jobs.kill_a_rank(command, "MPI rank 1, tcp://", "prefill-worker")
    assert job.returncode != 0 and "rank 1" in job.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--join", "127.0.0.1:1"], "join: an MPI job has the ranks it was started with"),
        (["--cores", "9999"], "cores: this process may not use [9999]"),
        (["--listen", "127.0.0.1:0"], "listen: must be tcp://HOST:PORT"),
    ],
)
def test_flags_are_checked_before_the_job_is_joined(flags: list[str], message: str) -> None:
    job = subprocess.run([*NO_MODEL, *flags], capture_output=True, text=True, check=False)
    assert job.returncode == 2 and message in job.stderr and "this process is alone" not in job.stderr
