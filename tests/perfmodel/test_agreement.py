"""Compares plans with simulations of the same flags: tokens per second and time per token within 3 %."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main
from fastdecode.perfmodel.lab.step_mix import StepMix, batch_tokens
from fastdecode.perfmodel.sizing import Workload

PAIRS = [
    pytest.param("opt-175b", "a100", "graviton4", 1024, 256, "300", marks=pytest.mark.thorough),
    ("llama-13b", "a100", "epyc-9654", 1024, 128, "100"),
    ("kimi-k2", "h200", "threadripper-7995wx", 1024, 256, "300"),
    pytest.param("opt-6.7b", "rtx-5090", "epyc-7452", 256, 256, "100", marks=pytest.mark.thorough),
    pytest.param("opt-175b", "h200", "graviton4", 512, 128, "300", marks=pytest.mark.thorough),
    pytest.param("qwen3-32b", "mi300x", "threadripper-7995wx", 256, 1024, "50", marks=pytest.mark.thorough),
    pytest.param("llama-7b", "l4", "epyc-7452", 2048, 128, "inf", marks=pytest.mark.thorough),
]
"""Cases: ranks and one GPU, remote hosts and the GPU's own, prompts shorter and longer than a step's budget."""


def written(words: list[str], path: Path) -> dict[str, Any]:
    """Return the JSON that a command writes."""
    assert main([*words, "--output-json", str(path)]) == 0
    return dict(json.loads(path.read_text("utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu", "cpu", "prompt", "output", "tpot"), PAIRS)
def test_plan_and_simulate_agree(
    model: str, gpu: str, cpu: str, prompt: int, output: int, tpot: str, tmp_path: Path
) -> None:
    names = ["--model", model, "--gpu", gpu, "--cpu", cpu]
    lengths = ["--seq-len", str(prompt + output), "--prompt-len", str(prompt)]
    plan = written(["plan", *names, *lengths, "--tpot", tpot], tmp_path / "plan.json")
    users = plan["in_flight"]
    flags = {
        "--random-input-len": prompt,
        "--random-output-len": output,
        "--num-prompts": 8 * users,
        "--max-num-seqs": users,
        "--num-r-workers": plan["num_r_workers"],
        "--num-mini-batches": plan["num_mini_batches"],
        "--tensor-parallel-size": plan["tensor_parallel_size"],
        "--max-num-batched-tokens": batch_tokens(users, Workload(prompt + output, prompt)),
        "--kv-load-limit": plan["kv_load_limit"],
        "--latent-absorption": plan["latent_absorption"],
    }
    words = [str(word) for pair in flags.items() for word in pair]
    steady = written(["simulate", *names, *words], tmp_path / "simulation.json")["steady"]
    assert steady["tokens_per_second"] == pytest.approx(plan["output_tokens_per_second"], rel=0.03)
    assert steady["tpot_seconds"] == pytest.approx(plan["tpot_seconds"], rel=0.03)


def test_prompts_take_seats_and_steps_by_hand() -> None:
    """Check 64 seats with outputs of 100 tokens after prompts of 4,000, by hand.
    A prompt takes two chunks of 1,988 and a rest, in steps of 2,688 tokens. Without prompts every seat gets a token in
    every step.
    """
    workload = Workload(4100, 4000)
    budget = batch_tokens(64, workload)
    mix = StepMix.of(workload, 64)
    assert budget == 2688 and mix.decoding == pytest.approx(64 * 100 / (100 + 4000 / (budget - mix.decoding) - 0.5))
    parts = list(mix.steps())
    assert sum(share for share, _ in parts) == pytest.approx(1.0)
    assert sum(share * rows for share, rows in parts) == pytest.approx(mix.decoding * workload.rows_per_output_token)
    assert list(StepMix.of(Workload(100), 64).steps()) == [(1.0, 64)] and batch_tokens(64, Workload(100)) == 2048
