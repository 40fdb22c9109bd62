"""``fastdecode simulate``: the benchmark's keys, all ways to name a machine, and one clear line per impossible case."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.hardware import profile

from fastdecode.cli.main import main
from fastdecode.perfmodel.lab.cli.simulate import add_command
from fastdecode.perfmodel.lab.cli.simulate_inputs import read_simulation
from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun, throughput_report
from fastdecode.perfmodel.model_config import read_shape
from fastdecode.perfmodel.profile_json import write_profile

pytestmark = pytest.mark.slow

SIZES = ["--random-input-len", "20", "--random-output-len", "30", "--num-prompts", "24", "--max-num-seqs", "8"]
BATCH = ["--max-num-batched-tokens", "64"]
NAMES = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452"]
BARE = ["--s-part-seconds", "7.08e-3", "--r-part-seconds-per-token", "1.239e-7", "--num-layers", "32"]
ALONE = ["--model", "mistral-7b", "--gpu", "a100", "--num-r-workers", "0"]
YI = ["--model", "yi-34b", "--num-r-workers", "0"]
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
    assert found["scheduling_delay_seconds"]["p50"] > 0  # 24 requests share 8 seats
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "llama-7b on a10 and epyc-7452, 2 R-worker(s): 24 requests, sls" in text and "Throughput: " in text


def test_r_workers_by_plan_and_a_load_limit_by_balance(tmp_path: Path) -> None:
    """Bare numbers: in the T = 7.08 ms of each of two mini-batches, the one R-worker attends T / R tokens."""
    found = simulate(tmp_path, *BARE)
    assert found["kv_load"]["limit_tokens"] == int(2 * 7.08e-3 / 1.239e-7)
    assert found["decode"]["step_seconds_p50"] == pytest.approx(32 * 2 * 7.08e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("machine", "schedule", "number"),
    [
        ([*NAMES, "--overlapped-transport"], "sls", 3),
        (NAMES, "sls", 2),
        (NAMES, "request-level", 2),
        ([*NAMES, "--link", "10Tb"], "sls", 2),
        (BARE, "sls", 2),
    ],
)
def test_auto_takes_the_mini_batches_whose_steps_take_less(machine: list[str], schedule: str, number: int) -> None:
    """At R = S, two mini-batches wait for the link; a third one costs one more loading of the weights.
    Waves are far from R = S most of the time.
    """
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    workload = ["--random-input-len", "16", "--random-output-len", "1008", "--num-prompts", "1024"]
    engine = ["--num-r-workers", "8", "--max-num-seqs", "1024", "--schedule", schedule, "--num-mini-batches", "auto"]
    inputs = read_simulation(parser.parse_args(["simulate", *machine, *workload, *engine]))
    assert inputs.limits.num_mini_batches == number


def test_an_automatic_load_limit_counts_seats_and_not_requests(tmp_path: Path) -> None:
    """The limit equals that of a live run with the same figures."""
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
    at_once = simulate(tmp_path, *ALONE, *flags, "--request-rate", "inf")
    assert at_once["elapsed_time"] < 1 and at_once["config"]["request_rate"] == "inf"


@pytest.mark.thorough
def test_a_capacity_keeps_its_slo_and_a_looser_one_is_no_less(tmp_path: Path) -> None:
    """The report describes the run at that rate."""
    flags = [*ALONE, "--num-prompts", "60", "--schedule", "stall-free"]
    rates = []
    for delay in ("0.2", "0.5"):
        found = simulate(tmp_path, *flags, "--slo-tbt-p99", "0.1", "--slo-delay-p50", delay)
        rates.append(found["capacity"]["requests_per_second"])
        assert found["tbt_seconds"]["p99"] <= 0.1 and found["scheduling_delay_seconds"]["p50"] <= float(delay)
        assert found["config"]["request_rate"] == rates[-1] > 0
    assert rates[0] <= rates[1]


def test_where_no_rate_keeps_the_slo_the_report_has_the_rate_it_ran_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*ALONE, "--num-prompts", "4", "--random-output-len", "4", "--slo-tbt-p99", "1e-9"]
    for rate, reported in ((["--request-rate", "5"], 5.0), ([], "inf")):
        found = simulate(tmp_path, *flags, *rate)
        assert "Capacity: none" in capsys.readouterr().out
        assert found["capacity"]["requests_per_second"] == 0
        assert found["config"]["request_rate"] == reported


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
        ([*YI, "--gpu", "a10"], 1, "has room for 21.6 GB: 47.2 GB too little (needs 4 of its kind"),
        ([*NAMES, "--slo-delay-p50", "inf"], 2, "slo_delay_p50 is one of two limits of a capacity search"),
        ([*NAMES, "--slo-tbt-p99", "1", "--slo-delay-p50", "inf"], 2, "delay_p50_seconds must be above 0 seconds"),
        ([*ALONE, "--cpu", "epyc-7452"], 2, "the GPU alone: cpu has no place there"),
        ([*ALONE, "--profile", "p.json"], 2, "the GPU alone: profile has no place there"),
        ([*ALONE, *BARE], 2, "the GPU alone: s_part_seconds has no place there"),
        ([*ALONE, "--num-layers", "0"], 2, "the GPU alone: num_layers has no place there"),
        ([*ALONE, "--link", "100Gb"], 2, "the GPU alone: link has no place there"),
        ([*ALONE, "--kv-cache-memory", "1GiB"], 2, "the GPU alone: kv_cache_memory has no place there"),
        ([*ALONE, "--exposed-transport"], 2, "the GPU alone: exposed_transport has no place there"),
        ([*NAMES, "--dataset-name", "sarathi-chat", "--dataset-path", "x"], 2, "'sarathi-chat' reads no file"),
        ([*NAMES, "--dataset-path", "x"], 2, "'random' reads no file; it is for --dataset-name trace"),
        ([*BARE, "--tensor-parallel-size", "2"], 2, "tensor_parallel_size has no place beside bare numbers"),
        ([*NAMES, "--events", "/no/such"], 2, "cannot read events /no/such"),
        ([*NAMES, "--mtbf", "0"], 2, "mtbf must be above 0 hours and finite, not 0.0"),
        ([*NAMES, "--restart-seconds", "1"], 2, "restart_seconds is for R-workers that are lost at random"),
        ([*NAMES, "--mtbf", "1", "--restart-seconds", "-1"], 2, "restart_seconds must be at least 0, not -1.0"),
        ([*ALONE, "--mtbf", "1"], 2, "the GPU alone: mtbf has no place there"),
        ([*NAMES, "--num-r-workers", "1", "--mtbf", "1e-6"], 1, "simulated seconds the last R-worker is lost"),
        (
            [*NAMES, "--num-r-workers=8", "--mtbf=1e-4", "--restart-seconds=0", "--num-prompts=1", "--input-len=16384"],
            1,
            "8 R-workers have been lost 804 times and no request has ended meanwhile",
        ),
        ([*NAMES, "--output-json", "."], 2, ".: is a folder; name a file to write"),
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


def test_weights_that_leave_no_room_for_a_block(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The vocabulary takes all but a few KB of an A10's memory for weights and cache."""
    config: dict[str, Any] = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "vocab_size": 1, "torch_dtype": "float16",
    }  # fmt: skip
    left = 0.9 * 24e9 - read_shape(config, "m").weight_bytes
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"vocab_size": int(left / (2 * 2 * 4096))}))
    assert main(["simulate", *SIZES, *BATCH, "--model", str(path), "--gpu", "a10", "--num-r-workers", "0"]) == 2
    assert "and 0 cached tokens, fewer than the 32 tokens of one KV block" in capfd.readouterr().err


@pytest.mark.thorough  # nor does a plan fit
def test_a_simulation_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from fastdecode.cli.main import main
from fastdecode.perfmodel.lab.cli.simulate import add_command
from fastdecode.perfmodel.lab.cli.simulate_inputs import read_simulation
status = main(["simulate", *{[*SIZES, *BATCH, *NAMES]!r}])
heavy = {{"torch", "transformers"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else status)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_prefill_workers_take_prompts_from_the_s_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With prefill workers decodes never wait for a prompt, and the first token comes sooner."""
    given = [*NAMES, "--num-r-workers", "2", "--random-input-len", "1000", "--request-rate", "4"]
    without = simulate(tmp_path, *given)
    found = simulate(tmp_path, *given, "--num-prefill-workers", "2", "--prefill-link", "300GB")
    assert found["utilisation"]["remote_prompts"] == 24
    assert 0 < found["utilisation"]["prefill_workers"] <= 1
    assert "2 prefill worker(s)" in capsys.readouterr().out
    assert found["ttft_seconds"]["p50"] < without["ttft_seconds"]["p50"]
    assert found["tbt_seconds"]["p99"] < without["tbt_seconds"]["p99"]
    assert found["total_output_tokens"] == without["total_output_tokens"]


def test_events_are_told_with_what_they_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same run without events gives the rate for comparison; with two copies almost nothing is recomputed."""
    path = tmp_path / "events.jsonl"
    lines = [("lose", 1, 1.0), ("slow", 0, 1.2), ("join", 1, 1.5), ("drain", 2, 1.6), ("drain", 2, 9.0)]
    more = {"slow": {"factor": 2.0}}
    path.write_text(
        "\n".join(
            json.dumps({"seconds": seconds, "event": kind, "r_worker": worker} | more.get(kind, {}))
            for kind, worker, seconds in lines
        )
    )
    given = [*NAMES, "--num-r-workers", "4", "--num-prompts", "48", "--seconds-per-moved-token", "1e-6"]
    undisturbed = simulate(tmp_path, *given)
    found = {}
    for copies in ("1", "2"):
        found[copies] = simulate(tmp_path, *given, "--events", str(path), "--num-copies", copies)
        events = found[copies]["events"]
        assert [events[name] for name in ("lost", "joined", "slowed", "drained", "ignored")] == [1, 1, 1, 1, 1]
        assert events["output_tokens_per_second"] == found[copies]["output_tokens_per_second"]
        assert 0 < events["kept_share"] <= 1 and events["given_up_requests"] == 0
        assert 0 < events["pause_seconds"]["p50"] <= events["pause_seconds"]["max"] and events["num_pauses"] > 0
        # it takes the place of the lost one
        assert found[copies]["lost_workers"] == found[copies]["joined_workers"] == 1
        assert found[copies]["total_output_tokens"] == 48 * 30
    assert found["1"]["events"]["output_tokens_per_second_without"] == undisturbed["output_tokens_per_second"]
    assert found["2"]["events"]["recomputed_tokens"] <= 2 < found["1"]["events"]["recomputed_tokens"]
    assert found["2"]["config"]["kv_replicas"] == 2 and undisturbed["events"] is None
    text = capsys.readouterr().out
    assert "Events: 1 lost, 1 joined, 1 drained, 1 slowed; 1 ignored" in text and "with the events" in text


def test_random_losses_are_those_of_the_seed(tmp_path: Path) -> None:
    given = [*NAMES, "--num-r-workers", "4", "--num-prompts", "48", "--mtbf", "0.002", "--restart-seconds", "0.5"]
    first, again, other = (simulate(tmp_path, *given, "--seed", seed)["events"] for seed in ("1", "1", "2"))
    assert first == again != other and first["lost"] > 0 and first["lost"] - first["joined"] in (0, 1, 2)


def test_two_copies_need_two_r_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine refuses one R-worker for two copies too; an automatic plan has at least two."""
    assert main(["simulate", *NAMES, "--num-r-workers", "1", "--kv-replicas", "2"]) == 2
    assert "two copies need two R-workers" in capsys.readouterr().err
    assert main(["simulate", *NAMES, "--num-prompts", "2", "--kv-replicas", "2"]) == 0


def test_the_gpu_alone_reads_what_its_windows_leave(tmp_path: Path) -> None:
    """With room for all tokens, windows make nothing slower; a window in every layer reduces reads and memory."""
    path = tmp_path / "config.json"
    found = []
    for window in (None, 16):
        shape = {
            "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": window,
        }  # fmt: skip
        path.write_text(json.dumps(shape))
        found.append(simulate(tmp_path, "--model", str(path), "--gpu", "a100", "--num-r-workers", "0"))
    assert found[1]["elapsed_time"] < found[0]["elapsed_time"]
