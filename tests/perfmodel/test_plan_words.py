"""The words of ``fastdecode plan``: no sentence claims more than the figures beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main
from fastdecode.perfmodel.lab.verdict import digits

A10 = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--seq-len", "1024"]
A100 = ["--model", "llama-3-8b", "--gpu", "a100", "--cpu", "epyc-9654", "--seq-len", "16384"]
CLUSTER = ["--model", "llama-3.3-70b", "--gpu", "h100", "--cpu", "epyc-9965", "--tensor-parallel-size", "4"]
CLUSTER += ["--seq-len", "131072"]
DESK = ["--gpu", "1792GB/s:210TFLOPS:32GiB", "--cpu", "90GB/s:16cores:64GiB"]
FP8 = ["--model", "qwen3-32b", "--weights", "fp8", *DESK, "--seq-len", "65536", "--prompt-len", "60000"]


def said(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """Return the figures and the printed text of ``plan``."""
    path = tmp_path / "plan.json"
    assert main(["plan", *words, "--output-json", str(path)]) == 0
    return json.loads(path.read_text("utf-8")), capsys.readouterr().out


def test_servers_of_gpus_alone_are_counted_for_tokens_and_for_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text = said(tmp_path, capsys, *A10, "--tpot", "inf")
    alone = found["gpu_only"]
    servers = -(-found["output_tokens_per_second"] // alone["output_tokens_per_second"])
    as_many = -(-found["users"] // alone["users"])
    assert f"{servers:.0f} servers of 1 x a10 alone give as many tokens per second" in text
    assert f"for {servers * alone['users']:.0f} users, and {as_many} serve as many users." in text
    best = next(row for row in found["tensor_parallel"] if row["tensor_parallel_size"] == 4)
    assert best["alone_tokens_per_second"] > found["output_tokens_per_second"]
    assert f"One server of 4 GPUs alone serves {best['alone_users']} users" in text and "4,256 tokens/s in all" in text
    assert "One server of" not in said(tmp_path, capsys, *CLUSTER)[1], "no compared server gives as many"


@pytest.mark.parametrize(
    ("words", "unpacks"),
    [
        (CLUSTER, False),  # Weights are plain, so ranks only share them.
        (FP8, True),  # Several ranks cut plain weights only, so these are unpacked.
        ([*FP8[:2], "--weights", "gguf-q4_k_m", *DESK, "--seq-len", "4096"], True),
        ([*FP8[:2], "--weights", "awq", "--gpu", "h100", "--cpu", "epyc-9654", "--seq-len", "4096"], False),
    ],
)
def test_only_weights_that_are_unpacked_are_said_to_be(
    words: list[str], unpacks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = said(tmp_path, capsys, *words)
    assert ("its S-worker unpacks" in text) == unpacks == ("the S-worker unpacks them to" in text)


def test_a_limit_that_is_missed_is_not_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = said(tmp_path, capsys, *FP8)
    assert not found["keeps_limits"] and "at most 100 ms" not in text
    assert "; wanted 100 ms per token (the default of --tpot); not met" in text
    own, free = found["output_tokens_per_second"], found["without_limits"]["output_tokens_per_second"]
    assert free > own and f"without it FastDecode gives {digits(free)} tokens/s" in text
    assert f" {digits(own)} tokens/s in all" in text


def test_prices_are_those_that_were_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, given = said(tmp_path, capsys, *CLUSTER, "--gpu-price", "3", "--cpu-price", "1")
    assert "h100: 3 an hour (--gpu-price)" in given and "epyc-9965: 1 an hour (--cpu-price)" in given
    assert "2.69" not in given and "unless total throughput matters more than price" in given
    assert "--cpu-price 0" not in given
    _, listed = said(tmp_path, capsys, *A100, "--tpot", "200")
    owned = re.search(r"with hosts that you own \(--cpu-price 0\): ([\d.]+) USD", listed)
    assert owned and "a100: 1.39 USD an hour" in listed
    _, own = said(tmp_path, capsys, *A100, "--tpot", "200", "--cpu-price", "0")
    assert f"cost {owned[1]} USD with FastDecode" in own and "epyc-9654: 0 an hour (--cpu-price)" in own


def test_bytes_of_a_token_are_of_a_rank_and_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(tmp_path, capsys, *CLUSTER)
    assert "81,920 bytes held over all layers for each of 4 ranks (327,680 in all)" in text
    assert "1 operation per byte" in said(tmp_path, capsys, *A10)[1]


def test_rows_say_what_they_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows beyond the latency limit are marked, rows beyond memory have no speed, and no line says "8, not 8"."""
    texts = []
    for words in (A10, [*A10, "--tpot", "inf"], CLUSTER, [*A100, "--tpot", "200"], [*A10, "--tpot", "20"]):
        found, text = said(tmp_path, capsys, *words)
        texts.append(text)
        rows = text.split("Other numbers of R-workers")[1].split("\n\n")[0].splitlines()[2:]
        for line, row in zip(rows, found["candidates"], strict=True):
            limit = found["limits"]["tpot_seconds"] or float("inf")
            assert ("does not fit" in line) == (not row["fits_memory"])
            assert line.endswith("over limit") == (row["fits_memory"] and row["step_seconds"] > limit)
    for text in texts:
        assert not re.search(r"\b(\d+)( R-worker\S*)?( hold it)?, not \1\b", text) and "(s)" not in text
        assert re.search(r"losses cost +[\d.,]+ of [\d.,]+ tokens/s if each R-worker fails once an hour; ", text)
        assert re.search(r"R-workers +\d+[^\n]* \([\d.,]+ by the equations", text)
        busy = re.search(r"bottleneck +(s-worker|r-workers); the rest of a step, (\d+)%, is transfers", text)
        assert busy is None or f"{busy[1][0].upper()} busy {100 - int(busy[2])}%" in text
    assert "bottleneck        s-worker; the rest of a step, 38%" in texts[1]


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,350"), (561.7049, "561.7"), (3.2561, "3.256"), (1000000.0, "1,000,000")]
)
def test_digits_without_powers(value: float, text: str) -> None:
    assert digits(value) == text
