"""The command line: exit statuses, one-line errors, and the JSON on which scripts depend."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import model_zoo
from helpers.forks import FASTDECODE
from helpers.processes import PATIENCE_SECONDS

from fastdecode.api.config import EngineConfig
from fastdecode.cli.main import build_parser, main
from fastdecode.cli.output import write_json
from fastdecode.core.errors import ConfigError
from fastdecode.llm import LLM
from fastdecode.perfmodel.lab.measure.dataset import WorkloadSpec
from fastdecode.perfmodel.lab.measure.throughput import run_baseline

pytestmark = pytest.mark.slow

SMALL = ["--max-model-len", "300", "--kv-cache-memory", "64MiB", "--s-threads", "1", "--r-threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny Llama without a tokenizer and return its folder."""
    return str(model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama")))


def bench(folder: str, *more: str) -> list[str]:
    """Return the arguments of a benchmark small enough for a test."""
    sizes = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "8"]
    return ["bench", "throughput", "--model", folder, "--skip-tokenizer-init", *SMALL, *sizes, *more]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["generate", "hi", "--model", "/no/such/folder"], 1, "no such folder"),
        (["generate", "hi", "--temperature", "-1"], 2, "temperature"),
        (["generate", "hi", "--top-p", "1.5"], 2, "top_p"),
        (["generate", "hi", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"], 2, "at least max_num_seqs"),
        (["generate", "hi", "--kv-cache-memory", "much"], 2, "kv_cache_memory must be a positive number of bytes"),
        (
            ["generate", "hi", "--r-workers", "mpi:2"],
            2,
            "r_workers must be inproc, inproc:N, spawn:N, join:N, ray:N, mpi or host:port",
        ),
        (["generate", "hi", "--kv-load-limit", "-3"], 2, "kv_load_limit must be a whole number of at least 1, not -3"),
        (["generate", "hi", "--tbt-target", "0"], 2, "tbt_target must be above 0 seconds"),
        (["generate", "hi", "--tbt-target", "1e-9"], 2, "a step of 256 tokens, one for each of max_num_seqs, takes"),
        (["generate", "hi", "--hf-overrides", '{"no_such_key": 1}'], 1, "no configuration key 'no_such_key'"),
        (["bench", "throughput", "--dataset-name", "sharegpt"], 2, "needs --dataset-path"),
        (["bench", "throughput", "--trace", "/no/such/folder/t.json"], 2, "there is no such folder to write it in"),
        (["bench", "throughput", "--plot-steps", "/tmp"], 2, "/tmp: is a folder"),
        (["bench", "throughput", "--backend", "transformers", "--measure-overlap"], 2, "measure_overlap is not for"),
        (["bench", "throughput", "--num-mini-batches", "1", "--measure-overlap"], 2, "give --num-mini-batches 2"),
        (["bench", "throughput", "--backend", "transformers", "--request-rate", "1"], 2, "request_rate is not for"),
        (["bench", "attention", "--cache-bytes", "1"], 2, "cache_bytes must be at least 1 MiB for each thread"),
        (["bench", "attention", "--context-len", "9" * 20], 2, "context_len must be a number of tokens"),
        (["bench", "attention", "--num-heads", "9" * 5000], 2, "num_heads must have at most 12 digits"),
        (
            ["generate", "hi", "--max-num-seqs", "9" * 20, "--max-num-batched-tokens", "9" * 21],
            2,
            "max_num_seqs must be",
        ),
        (["bench", "throughput", "--random-range-ratio", "2"], 2, "random_range_ratio must be in [0, 1)"),
        (["bench", "throughput", "--dataset-path", "a.json"], 2, "dataset_path: dataset 'random' reads no file"),
        (["bench", "throughput", "--plot-steps", "steps.txt"], 2, "steps.txt: a plot must end in .png, .pdf or .svg"),
        (["bench", "throughput", "--plot-timeline", "steps"], 2, "steps: a plot must end in .png, .pdf or .svg"),
        (["generate", "hi", "--profile", "no.json"], 2, "profile: there is no file 'no.json'; `fastdecode calibrate`"),
        (["generate", "hi", "--profile", __file__], 1, "not valid JSON"),
        (["generate", "hi", "--tensor-parallel-size", "0"], 2, "tensor_parallel_size must be a whole number"),
        (["generate", "hi", "--data-parallel-size", "2"], 2, "data_parallel_size: start one engine each, or one with"),
        (
            ["serve", "--port", "0", "--chat-template", "\n{% for x in %}"],
            2,
            "chat_template: line 2 is no Jinja template",
        ),
        (["serve", "--port", "0", "--api-key", ""], 2, "api_key (or FASTDECODE_API_KEY) must be ASCII text"),
        (["serve", "--ssl-keyfile", __file__, "--ssl-certfile", "/no"], 2, "ssl_certfile: cannot read '/no' (No such"),
        (["serve", "--ssl-keyfile", __file__, "--ssl-certfile", __file__], 2, "are no certificate and key in PEM"),
        (["serve", "a", "--model", "b"], 2, "'a' and --model 'b' are two models: give one"),
        (
            ["serve", "--disable-log-stats", "a", "--quantization", "int3"],
            2,
            "quantization: packed checkpoints and GGUF",
        ),
        (["r-worker", "--kv-cache-memory", "1"], 2, "kv_cache_memory must be at least 1000 bytes, not 1; give a unit"),
    ],
)
def test_failures_are_one_clear_line(
    arguments: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The status is 2 for wrong usage and 1 for failure; stderr has one line and no traceback."""
    assert main(arguments) == status
    error = capfd.readouterr().err.strip()
    assert error.startswith("fastdecode: error: ") and message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hi", "--dtype", "float8"],
        ["generate", "hi", "--schedule", "lottery"],
        ["serve", "--por", "1"],
        [],
        ["bench"],
        ["generate"],
        ["generate", "hi", "--max-tok", "3"],
        ["bench", "throughput", "--r-work", "mpi"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The parser names the wrong argument in one line, and points to the help in another."""
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2
    error, help_line = capfd.readouterr().err.splitlines()
    assert error.startswith("fastdecode") and help_line.endswith("--help shows how it is used")


def test_empty_prompt_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """Token ids may not be empty; an empty text may still give a begin-of-text token."""
    assert main(["generate", "x" * 2000, *SMALL]) == 1
    assert "max_model_len is 300: it must be at most 299" in capfd.readouterr().err
    assert main(["generate", "x" * 5000, *SMALL]) == 1
    assert "5000 bytes of text, and max_model_len is 300 tokens" in capfd.readouterr().err


def test_throughput_json_has_the_contract(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has all keys, sums agree, vLLM's line is printed, and overlap is measured in turns A B A B."""
    path = tmp_path / "out.json"
    assert main(bench(folder, "--output-json", str(path), "--num-mini-batches", "2", "--measure-overlap")) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    assert "Throughput: " in capsys.readouterr().out
    assert report["num_requests"] == 6
    assert report["total_output_tokens"] == 48
    assert report["total_num_tokens"] == 6 * 28
    assert report["decode"]["steps"] == 3  # Four of seven steps ran without overlap, for the comparison.
    assert report["decode"]["tokens"] == 18
    assert report["prefill"]["tokens"] == 120
    assert report["kv_load"]["peak_tokens"] == 6 * 27
    parts = report["breakdown"]
    states = parts["s_seconds"] + parts["wait_seconds"] + parts["host_seconds"]
    assert states == pytest.approx(parts["wall_seconds"])
    assert 0 < parts["r_seconds"] <= parts["wall_seconds"]
    assert parts["overlap_gain"] > 0 and parts["overlap_efficiency"] is None
    assert report["machine"]["read_peak_gb_per_s"] > 0
    assert report["config"]["num_mini_batches"] == 2
    keys = {"elapsed_time", "requests_per_second", "tokens_per_second", "output_tokens_per_second", "ttft_seconds"}
    assert keys | {"tbt_seconds", "prefix_cache", "preemptions", "lost_workers"} <= set(report)


def test_a_disk_that_is_full_costs_no_figures(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The figures are printed before anything is written to the disk."""
    assert main(bench(folder, "--output-json", "/dev/full")) == 1
    output, error = capfd.readouterr()
    assert "Throughput: " in output and "No space left on device" in error


def test_vllms_names_are_taken_where_they_mean_the_same(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    lengths = ["--input-len", "7", "--output-len", "3", "--tensor-parallel-size", "1"]
    assert main(bench(folder, "--output-json", str(path), *lengths)) == 0
    report = json.loads(path.read_text())
    assert report["total_num_tokens"] == 6 * 10 and report["config"]["random_input_len"] == 7
    with pytest.raises(ConfigError, match="data_parallel_size: start one engine each"):
        LLM(folder, tensor_parallel_size=1, gpu_memory_utilization=0.9, data_parallel_size=2)


def test_every_setting_is_a_flag_with_its_default() -> None:
    """A parser without flags gives the defaults of all settings; only a server can be a standby."""
    args = build_parser(["generate"]).parse_args(["generate", "hi"])
    config = EngineConfig()
    assert {name: getattr(args, name, None) for name in vars(config)} == {**vars(config), "stands_by": None}
    args = build_parser(["bench", "throughput"]).parse_args(["bench", "throughput"])
    spec = WorkloadSpec()
    assert {field.name: getattr(args, field.name) for field in dataclasses.fields(spec)} == vars(spec)


def test_throughput_of_a_cut_model_is_scaled_up(folder: str, tmp_path: Path) -> None:
    """With num_hidden_layers overridden the whole model's throughput is estimated, and the output says so."""
    path = tmp_path / "out.json"
    cut = ["--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 1}']
    assert main(bench(folder, "--output-json", str(path), *cut)) == 0
    report = json.loads(path.read_text())
    layers = report["estimated_full_model"]["num_hidden_layers"]
    assert layers > 1
    step = report["decode"]["step_seconds_p50"]
    assert report["estimated_full_model"]["decode_step_seconds"] == pytest.approx(layers * step)


def test_transformers_backend_reports_the_same_keys(folder: str, tmp_path: Path) -> None:
    """The baseline by transformers reports the same keys."""
    path = tmp_path / "out.json"
    assert main(bench(folder, "--output-json", str(path), "--backend", "transformers")) == 0
    report = json.loads(path.read_text())
    assert report["total_output_tokens"] == 48
    assert report["decode"]["steps"] == 7
    assert report["output_tokens_per_second"] > 0


def test_ctrl_c_keeps_the_static_batches_that_ended(folder: str) -> None:
    """Ctrl-C comes after the second of three batches."""

    class Bar(contextlib.AbstractContextManager["Bar"]):
        done = 0

        def update(self, count: int) -> None:
            self.done += count
            if self.done == 4:
                raise KeyboardInterrupt

        def __exit__(self, *error: object) -> None:
            pass

    config = EngineConfig(folder, device="cpu", skip_tokenizer_init=True, max_num_seqs=2, max_num_batched_tokens=64)
    spec = WorkloadSpec(random_input_len=8, random_output_len=4, num_prompts=6)
    report, interrupted = run_baseline(config, spec, lambda total: Bar())
    assert interrupted and report["num_requests"] == 4 and report["total_output_tokens"] == 16


def test_where_r_workers_may_join_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """The command prints the free port that it chose, since R-workers have to know it."""
    sizes = ["--kv-cache-memory", "16MiB", "--max-model-len", "64", "--max-tokens", "1"]
    assert main(["generate", "hi", "--pool-listen", "127.0.0.1:0", *sizes]) == 0
    assert re.search(r"^fastdecode: R-workers may join at 127\.0\.0\.1:[1-9]\d+$", capfd.readouterr().err, re.MULTILINE)


def test_a_target_between_tokens_is_timed_within_a_small_cache(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max-model-len", "256", "--kv-cache-memory", "2MiB", "--max-tokens", "2"]
    assert main(["generate", "hi", "--tbt-target", "5", *sizes]) == 0, capfd.readouterr().err


def test_a_trace_that_cannot_be_written_takes_no_figures_with_it(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On /dev/full, a disk without room, the figures come first, then exit 1 and the file's name."""
    path = tmp_path / "out.json"
    assert main(bench(folder, "--trace", "/dev/full", "--output-json", str(path))) == 1
    out, err = capfd.readouterr()
    assert "Throughput: " in out and json.loads(path.read_text())["num_requests"] == 6
    assert "No space left on device: '/dev/full'" in err
    with pytest.raises(OSError, match="/dev/full"):
        write_json({}, "/dev/full")


def test_trace_is_chromes_format(folder: str, tmp_path: Path) -> None:
    """The trace has an S lane and an R lane, with mini-batches A and B in both."""
    path = tmp_path / "trace.json"
    assert main(bench(folder, "--trace", str(path), "--num-mini-batches", "2")) == 0
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"s", "wait", "host", "r"} or {"s", "host", "r"} <= {
        e["cat"] for e in spans
    }
    assert {(event["tid"], event["args"]["mini_batch"]) for event in spans} >= {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(event["dur"] >= 0 for event in spans)


def test_generate_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model continues the prompt, and ``--json`` prints the same text."""
    prompt = "def add(a, b):\n"
    assert main(["generate", prompt, "--max-tokens", "12", "--temperature", "0", *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.startswith(prompt) and len(text) > len(prompt) + 1
    assert main(["generate", prompt, "--max-tokens", "12", "--temperature", "0", "--json", *SMALL]) == 0
    output = json.loads(capsys.readouterr().out)
    assert text == prompt + output["outputs"][0]["text"] + "\n"
    assert output["outputs"][0]["finish_reason"] == "length"


def test_collect_env_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line has one fact."""
    assert main(["collect-env"]) == 0
    output = capsys.readouterr().out
    assert "torch:" in output and "instruction sets:" in output


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.thorough),
    ],
)
def test_a_benchmark_that_is_ended_says_what_was_done(folder: str, number: int, status: int, last: str) -> None:
    """Ctrl-C or SIGTERM in the middle of a long benchmark leaves a line that says what was done."""
    arguments = bench(folder, "--num-prompts", "500", "--random-output-len", "100", "--max-num-seqs", "4")
    process = subprocess.Popen([FASTDECODE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "R-worker(s)" not in process.stdout.readline():
        assert process.poll() is None
    begun = sum(psutil.Process(process.pid).cpu_times()[:2])
    # Wait until the process has computed that long.
    while sum(psutil.Process(process.pid).cpu_times()[:2]) < begun + 0.3:
        time.sleep(0.05)
    process.send_signal(number)
    output, error = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == status
    assert "Throughput: " in output
    assert error.strip().endswith(f"fastdecode: {last}")
    assert "Traceback" not in error
