"""``bench latency``: vLLM's lines and keys, exact lengths, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import model_zoo

from fastdecode.api.outputs import RequestOutput
from fastdecode.cli.main import main
from fastdecode.llm import LLM
from fastdecode.perfmodel.lab.cli.bench_latency import latency_lines, latency_report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny Llama without a tokenizer and return its folder."""
    return str(model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama")))


def command(folder: str, *more: str) -> list[str]:
    small = ["--max-model-len", "64", "--kv-cache-memory", "16MiB", "--s-threads", "1", "--r-threads", "1"]
    sizes = ["--input-len", "9", "--output-len", "5", "--batch-size", "3"]
    return ["bench", "latency", "--model", folder, "--skip-tokenizer-init", *small, *sizes, *more]


def test_batches_are_timed_after_the_warm_up(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches warm up and four are measured, each of three prompts with two outputs of five tokens."""
    batches: list[list[RequestOutput]] = []
    generate = LLM.generate

    def recorded(self: LLM, *args: object, **settings: object) -> list[RequestOutput]:
        batches.append(generate(self, *args, **settings))  # type: ignore[arg-type]
        return batches[-1]

    monkeypatch.setattr(LLM, "generate", recorded)
    path = tmp_path / "latency.json"
    counts = ["--n", "2", "--num-iters-warmup", "2", "--num-iters", "4", "--output-json", str(path)]
    assert main(command(folder, *counts)) == 0
    assert len(batches) == 6
    assert all([len(output.outputs[i].token_ids) for output in batch for i in (0, 1)] == [5] * 6 for batch in batches)
    assert all(len(output.prompt_token_ids) == 9 for output in batches[0])
    report = json.loads(path.read_text())
    assert len(report["latencies"]) == 4 and min(report["latencies"]) > 0
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 4)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-8:] == latency_lines(report)


def test_keys_and_lines_are_vllms() -> None:
    latencies = [0.1 * k for k in range(1, 102)]
    report = latency_report(latencies)
    assert list(report) == ["avg_latency", "std_latency", "latencies", "percentiles"]
    assert report["percentiles"] == pytest.approx({"10": 1.1, "25": 2.6, "50": 5.1, "75": 7.6, "90": 9.1, "99": 10.0})
    assert report["avg_latency"] == pytest.approx(5.1) and report["std_latency"] == pytest.approx(np.std(latencies))
    lines = latency_lines(report)
    assert lines[0] == f"Avg latency: {report['avg_latency']} seconds"
    assert lines[2] == f"10% percentile latency: {report['percentiles']['10']} seconds" and len(lines) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "0"], "batch_size must be at least 1, not 0"),
        (["--num-iters-warmup", "-1"], "num_iters_warmup must be at least 0, not -1"),
        (["--input-len", "60"], "input_len + output_len is 65, and max_model_len is 64"),
        (["--output-json", "/no/such/folder/a.json"], "there is no such folder to write it in"),
    ],
)
def test_refusals(folder: str, flags: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, *flags)) == 2
    assert message in capfd.readouterr().err
