"""Times that users notice, per token and to the first token, beside throughput, and limits that a plan keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.batch_search import BatchSearch
from fastdecode.perfmodel.lab.gpu_only import GpuOnly, GpuServer
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.lab.step_mix import StepMix
from fastdecode.perfmodel.lab.verdict import judge
from fastdecode.perfmodel.presets import find_cpu_host, find_gpu
from fastdecode.perfmodel.service import CHUNK_TOKENS, ServiceLimits, prompt_chunks
from fastdecode.perfmodel.sizing import Prices, Workload
from fastdecode.perfmodel.stages import GpuSPart

LLAMA = BUILT_IN["llama-7b"]
NAMES = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452"]


def answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], list[str]]:
    """Return the figures and the printed lines of ``plan``."""
    path = tmp_path / "plan.json"
    assert main(["plan", *words, "--output-json", str(path)]) == 0
    return json.loads(path.read_text("utf-8")), capsys.readouterr().out.splitlines()


def planner(workload: Workload, **more: Any) -> Planner:
    s_part, r_part = GpuSPart(LLAMA, find_gpu("a10")), host_r_part(LLAMA, "float16", find_cpu_host("epyc-7452"))
    return Planner(workload, 32, s_part, r_part, kv_bytes_per_token=524_288, **more)


@pytest.mark.parametrize("limit_ms", [120.0, 200.0, 700.0])
def test_a_plan_keeps_to_the_time_per_token_and_is_the_best_that_does(
    limit_ms: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*NAMES, "--seq-len", "2048", "--prompt-len", "1024", "--num-r-workers", "8", "--num-mini-batches", "2"]
    found, lines = answer(tmp_path, capsys, *words, "--tpot", str(limit_ms))
    assert found["tpot_seconds"] <= limit_ms / 1e3 and found["keeps_limits"]
    decoding = StepMix.of(Workload(2048, 1024), found["users"]).decoding
    assert decoding / found["tpot_seconds"] == pytest.approx(found["output_tokens_per_second"])
    larger, _ = answer(tmp_path, capsys, *words, "--mini-batch-size", str(found["mini_batch_size"] + 1))
    free, _ = answer(tmp_path, capsys, *words, "--tpot", "inf")
    assert larger["tpot_seconds"] > limit_ms / 1e3 or found["mini_batch_size"] == free["mini_batch_size"]
    assert "ms per token for each of" in lines[0] and lines[0] == found["verdict"]


CLUSTER = ["--model", "llama-3.3-70b", "--gpu", "h100", "--cpu", "epyc-9965", "--tensor-parallel-size", "4"]
CLUSTER += ["--seq-len", "131072"]


@pytest.mark.parametrize(
    "words",
    [
        [*CLUSTER, "--gpu-price", "3", "--cpu-price", "1"],
        [*CLUSTER, "--tpot", "200"],
        [*CLUSTER, "--ttft", "1"],
        ["--model", "llama-3-8b", "--gpu", "a100", "--cpu", "epyc-9654", "--seq-len", "16384", "--tpot", "60"],
        ["--model", "qwen3-32b", "--gpu", "h200", "--cpu", "epyc-9654", "--seq-len", "32768", "--prompt-len", "30000"],
    ],
)
def test_no_fewer_r_workers_serve_the_same_users_as_fast_within_the_limit(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer R-workers the batch gives fewer tokens per second, or exceeds the limit on time per token."""
    found, _ = answer(tmp_path, capsys, *words)
    assert found["keeps_limits"]
    limit, rate, number = found["limits"]["tpot_seconds"], found["output_tokens_per_second"], found["num_r_workers"]
    fewer = [row for row in found["candidates"] if row["num_r_workers"] < number and row["fits_memory"]]
    assert fewer and not [
        row for row in fewer if row["step_seconds"] <= limit and row["output_tokens_per_second"] >= rate
    ]
    batch = ["--mini-batch-size", str(found["mini_batch_size"]), "--num-mini-batches", str(found["num_mini_batches"])]
    one_less, _ = answer(tmp_path, capsys, *words, *batch, "--num-r-workers", str(number - 1))
    assert one_less["step_seconds"] > limit or one_less["output_tokens_per_second"] < rate


def test_what_a_limit_costs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, lines = answer(tmp_path, capsys, *NAMES, "--seq-len", "1024")
    without = found["without_limits"]
    assert found["limits"]["tpot_seconds"] == 0.1 and without["tpot_seconds"] > 0.5
    assert without["output_tokens_per_second"] > 2 * found["output_tokens_per_second"]
    assert any(
        line.startswith("The limit of 100 ms per token (the default of --tpot) costs throughput: without it")
        for line in lines[:4]
    )
    again, _ = answer(tmp_path, capsys, *NAMES, "--seq-len", "1024", "--tpot", "inf")
    assert again["output_tokens_per_second"] == without["output_tokens_per_second"] and not again["without_limits"]


def test_a_limit_that_nothing_keeps_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, lines = answer(tmp_path, capsys, *NAMES, "--seq-len", "1024", "--tpot", "20")
    assert lines[0].startswith("Do not use FastDecode here: it cannot keep to 20 ms per token.")
    assert not found["keeps_limits"] and found["use_fastdecode"] is False
    assert "the GPU alone cannot keep to 20 ms per token: one user waits" in lines[0]


def test_the_first_token_by_hand() -> None:
    """5,000 prompt tokens are two chunks and a rest beside 64 decodes, and 12.5 million pairs of tokens."""
    assert prompt_chunks(5000) == [(2.0, CHUNK_TOKENS), (1.0, 904.0)] and prompt_chunks(0) == [(1.0, 1.0)]
    made = planner(Workload(6000, 5000), pair_seconds=1e-9)
    _, kv_tokens = made.mean_step(64, 4)
    model = made.step_model(4)
    steps = [model.seconds(made.load(64 + rows, 64, kv_tokens, 4)) for rows in (2048, 2048, 904)]
    assert made.first_token_seconds(64, 4) == pytest.approx(sum(steps) + 1e-9 * 5000**2 / 2)
    limits = ServiceLimits(ttft_seconds=made.first_token_seconds(64, 4))
    pool = planner(Workload(6000, 5000), pair_seconds=1e-9, num_r_workers=4)
    assert BatchSearch(pool).within(limits) == 32


def test_the_gpu_alone_has_limits_too() -> None:
    server = GpuServer(LLAMA, find_gpu("a10"), 524_288, Workload(1024, 512))
    free = server.best()
    assert free.ttft_seconds == server.first_token_seconds(free.max_batch_size) and free.service() is not None
    limited = server.best(limits=ServiceLimits(tpot_seconds=0.035))
    assert 0 < limited.max_batch_size < free.max_batch_size and limited.limited_by == "time per token"
    none = server.best(limits=ServiceLimits(tpot_seconds=0.01))
    assert (none.max_batch_size, none.lone_step_seconds) == (0, server.step_seconds(1)) and none.service() is None


def test_every_verdict_names_the_time_per_token() -> None:
    made = planner(Workload(1024))
    plan = made.plan(512)
    rate = plan.output_tokens_per_second
    ways = [None, GpuOnly(0, 0.0, None, "memory"), GpuOnly(0, 0.0, None, "time per token", lone_step_seconds=0.2)]
    ways += [GpuOnly(30, part * rate, 0.045, "memory", 0.1) for part in (0.1, 0.9, 2.0)]
    for alone in ways:
        for limits in (ServiceLimits(), ServiceLimits(0.1), ServiceLimits(math.inf, 0.01)):
            sentence = judge(plan, alone, Prices(), limits).sentence
            assert f"{plan.step_seconds * 1e3:.0f} ms per token for each of 1,024 users" in sentence, sentence


@pytest.mark.parametrize(("flag", "value"), [("--tpot", "0"), ("--tpot", "nan"), ("--ttft", "-1")])
def test_limits_that_cannot_be(flag: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *NAMES, "--seq-len", "1024", flag, value]) == 2
    assert f"{flag[2:]} must be above 0" in capfd.readouterr().err


def test_a_simulation_says_what_each_user_feels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    words = [*NAMES, "--num-r-workers", "2", "--random-input-len", "16", "--random-output-len", "32"]
    assert main(["simulate", *words, "--num-prompts", "24", "--max-num-seqs", "8", "--output-json", str(path)]) == 0
    found, text = json.loads(path.read_text("utf-8")), capsys.readouterr().out
    assert "ms per token (TPOT" in text and "GPU alone, by the plan: each of" in text
    assert found["users"]["max"] == 8 and 0 < found["users"]["mean"] <= 8
    assert found["tpot_seconds"]["mean"] >= found["tbt_seconds"]["p50"] * 0.5
    assert found["gpu_only"]["users"] > 8
