"""``fastdecode simulate``: the benchmark's keys, every way to name a machine, and one clear line for what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastdecode.bench.report import throughput_report
from fastdecode.bench.throughput import ThroughputRun
from fastdecode.cli.main import main
from fastdecode.perfmodel.profile_json import write_profile

from .test_profile import profile

SIZES = ["--random-input-len", "20", "--random-output-len", "30", "--num-prompts", "24", "--max-num-seqs", "8"]
BATCH = ["--max-num-batched-tokens", "64"]
NAMES = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452"]
BARE = ["--s-part-seconds", "7.08e-3", "--r-part-seconds-per-token", "1.239e-7", "--num-layers", "32"]
ALONE = ["--model", "mistral-7b", "--gpu", "a100", "--num-r-workers", "0"]
CONTRACT = {*throughput_report(ThroughputRun(), True), "config", "machine", "scheduling_delay_seconds"}


def simulate(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "simulation.json"
    assert main(["simulate", *SIZES, *BATCH, *arguments, "--output-json", str(path)]) == 0
    return json.loads(path.read_text())


def test_names_give_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "steps.png"
    found = simulate(tmp_path, *NAMES, "--num-r-workers", "2", "--kv-load-limit", "200", "--plot-steps", str(picture))
    assert set(found) >= CONTRACT
    assert (found["num_requests"], found["total_output_tokens"]) == (24, 24 * 30)
    assert found["kv_load"]["peak_tokens"] <= found["kv_load"]["limit_tokens"] == 200
    assert found["breakdown"]["wall_seconds"] <= found["elapsed_time"]
    assert 0 < found["utilisation"]["r_workers_mean"] <= found["utilisation"]["r_workers_max"] < 1
    assert found["scheduling_delay_seconds"]["p50"] > 0  # 24 requests, 8 seats
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "llama-7b on a10 and epyc-7452, 2 R-worker(s): 24 requests, sls" in text and "Throughput: " in text


def test_r_workers_by_plan_and_a_load_limit_by_balance(tmp_path: Path) -> None:
    """Bare numbers: in the T = 7.08 ms of each of two mini-batches the one R-worker attends T / R tokens."""
    found = simulate(tmp_path, *BARE)
    assert found["kv_load"]["limit_tokens"] == int(2 * 7.08e-3 / 1.239e-7)
    assert found["decode"]["step_seconds_p50"] == pytest.approx(32 * 2 * 7.08e-3, rel=1e-3)


def test_an_automatic_load_limit_counts_seats_and_not_requests(tmp_path: Path) -> None:
    """As a live run's does, from the same figures."""
    few, many = (
        simulate(tmp_path, *NAMES, "--num-r-workers", "2", "--max-num-seqs", "64", "--num-prompts", number)
        for number in ("8", "24")
    )
    assert few["kv_load"]["limit_tokens"] == many["kv_load"]["limit_tokens"] > 0


def test_a_profile_says_whose_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(write_profile(profile()))
    found = simulate(tmp_path, "--profile", str(path), "--num-r-workers", "3")
    assert any("measured on cluster" in line for line in found["machine"]["assumptions"])
    assert "measured on cluster" in capsys.readouterr().out
    tokens = found["decode"]["tokens_per_second"] * found["breakdown"]["wall_seconds"]
    assert found["breakdown"]["host_seconds"] == pytest.approx(found["decode"]["steps"] * 1.3e-3 + tokens * 1e-6)


def test_a_trace_and_a_gpu_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"timestamp": {i * 10}, "input_length": 100, "output_length": {3 + i}}}\n' for i in range(4))
    )
    flags = ["--dataset-name", "trace", "--dataset-path", str(trace), "--num-prompts", "3", "--schedule", "fcfs"]
    found = simulate(tmp_path, *ALONE, *flags)
    assert (found["num_requests"], found["total_output_tokens"]) == (3, 3 + 4 + 5)
    assert 20 < found["elapsed_time"] < 21 and found["scheduling_delay_seconds"]["p50"] == 0.0
    assert simulate(tmp_path, *ALONE, *flags, "--request-rate", "1")["elapsed_time"] < 4


def test_a_capacity_keeps_its_slo_and_a_looser_one_is_no_less(tmp_path: Path) -> None:
    """The report is of the run at that rate."""
    flags = [*ALONE, "--num-prompts", "60", "--schedule", "stall-free"]
    rates = []
    for delay in ("0.2", "0.5"):
        found = simulate(tmp_path, *flags, "--slo-tbt-p99", "0.1", "--slo-delay-p50", delay)
        rates.append(found["capacity"]["requests_per_second"])
        assert found["tbt_seconds"]["p99"] <= 0.1 and found["scheduling_delay_seconds"]["p50"] <= float(delay)
        assert found["config"]["request_rate"] == rates[-1] > 0
    assert rates[0] <= rates[1]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "model is needed"),
        (["--num-r-workers", "0"], 2, "num_r_workers is 0, the GPU alone: name it and its model"),
        ([*NAMES, "--num-r-workers", "-1"], 2, "num_r_workers must be at least 0, not -1"),
        ([*NAMES, "--max-num-seqs", "65"], 2, "max_num_batched_tokens (64) must be at least max_num_seqs (65)"),
        ([*NAMES, "--num-mini-batches", "0"], 2, "num_mini_batches must be a whole number of at least 1"),
        ([*NAMES, "--max-model-len", "49"], 2, "prompt + output reach 50 tokens, and max_model_len is 49"),
        ([*NAMES, "--request-rate", "0"], 2, "request_rate must be above 0"),
        ([*NAMES, "--slo-tbt-p99", "0"], 2, "tbt_p99_seconds must be above 0 seconds"),
        ([*NAMES, "--kv-load-limit", "20"], 1, "exceeds the largest R-worker's share"),
        ([*NAMES, "--dataset-name", "trace"], 2, "dataset 'trace' needs --dataset-path"),
        ([*NAMES, "--dataset-name", "trace", "--dataset-path", "/no/such"], 2, "cannot read dataset /no/such"),
        ([*NAMES, "--dataset-name", "sarathi-chat", "--enable-prefix-caching"], 2, "and no tokens to compare"),
        ([*NAMES, "--kv-cache-memory", "20MB"], 1, "fewer than one sequence of"),
        (["--model", "yi-34b", "--gpu", "a10", "--num-r-workers", "0"], 2, "no room for a KV cache beside the weights"),
        ([*NAMES, "--output-json", "/no/such/folder/x.json"], 2, "there is no such folder"),
    ],
)
def test_failures_are_one_clear_line(
    arguments: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *SIZES, *BATCH, *arguments]) == status
    error = capfd.readouterr().err.strip()
    assert error.startswith("fastdecode: error: ") and message in error
    assert "\n" not in error


def test_a_simulation_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from fastdecode.cli.main import main
status = main(["simulate", *{[*SIZES, *BATCH, *NAMES]!r}])
heavy = {{"torch", "transformers"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else status)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
