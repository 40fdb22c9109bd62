"""Makes the tables of the calculator page (docs/calculator.md) with the planner, when the site is built.

A table has an entry for each combination of the choices in ``AXES``, so each entry is exactly what `fastdecode plan`
prints for the same flags. For models without a table, the page computes plans itself, with the figures of
``plan_data``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from functools import cache
from itertools import filterfalse
from typing import Any

import plan_data

from fastdecode.cli.main import build_parser
from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.cli.variants.ranges import RangeVariant
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase
from fastdecode.perfmodel.lab.gpu_only import held_bytes, usable_bytes
from fastdecode.perfmodel.lab.verdict import judge
from fastdecode.perfmodel.model_config import find_shape
from fastdecode.perfmodel.presets import find_gpu
from fastdecode.perfmodel.rank_costs import RankGroup, gpu_peer_link

MODELS = (
    "llama-7b", "llama-3-8b", "mistral-small", "qwen3-32b", "llama-3.3-70b", "gpt-oss-120b", "qwen3-235b-a22b",
    "minimax-m3", "deepseek-v3", "qwen3-next-80b-a3b",
)  # fmt: skip

AXES: dict[str, tuple[Any, ...]] = {
    "gpu": ("rtx-4090", "rtx-5090", "rtx-pro-6000", "a100", "h100", "h200"),
    "cpu": ("ryzen-9950x", "threadripper-7995wx", "epyc-9654", "xeon-8480"),
    "weights": ("plain", "gguf-q4_k_m"),
    "seq_len": (4096, 32768, 131072),
    "tpot": ("100", "300", "inf"),
}
"""The choices of each model's table, the last one changing fastest. Desktops hold the GPU; servers are 100 Gb/s off."""

PROMPT_EIGHTHS = 7
"""The prompt's part of ``seq_len``."""

MOST_RANKS = 64
NUM_DIGITS = 4
"""Digits of a figure that are kept."""

Choice = Mapping[str, Any]
Entry = dict[str, Any]


def tables() -> dict[str, str]:
    """Return scripts by file name: the choices, the page's figures, and a table per model without equations."""
    names = {"models": MODELS, "axes": AXES}
    scripts = {"choices.js": f"window.planChoices = {json.dumps(names)};\n"}
    scripts["data.js"] = plan_data.script(MODELS, AXES["weights"], _parser())
    for model in filterfalse(plan_data.is_plain, MODELS):
        entries = json.dumps(table(model), separators=(",", ":"))
        scripts[f"{model}.js"] = f"(window.planTables ??= {{}})[{json.dumps(model)}] = {entries};\n"
    return scripts


def table(model: str) -> list[Entry]:
    """Return the entries of one model, in the order of ``AXES``."""
    return [entry(model, dict(zip(AXES, choice, strict=True))) for choice in itertools.product(*AXES.values())]


def entry(model: str, choice: Choice) -> Entry:
    """Return the figures of one plan, or the planner's reason why there is none."""
    ranks = fewest_ranks(model, choice["gpu"])
    try:
        case, tokens = _case(flags(model, choice, ranks))
        return {"ranks": ranks, "kv_shard_tokens": tokens} | _figures(case)
    except PlanError as reason:
        return {"ranks": ranks, "reason": str(reason)}


def flags(model: str, choice: Choice, ranks: int) -> list[str]:
    """Return the command line of a plan, without the program's name."""
    words = ["plan", "--model", model, "--seq-len", str(choice["seq_len"])]
    words += ["--prompt-len", str(choice["seq_len"] * PROMPT_EIGHTHS // 8)]
    for name in ("gpu", "cpu", "tpot"):
        words += [f"--{name}", choice[name]]
    if choice["weights"] != "plain":
        words += ["--weights", choice["weights"]]
    return [*words, "--tensor-parallel-size", str(ranks)]


@cache
def fewest_ranks(model: str, gpu: str) -> int:
    """Return the fewest GPUs, a power of two, whose memory holds the model's weights; at most ``MOST_RANKS``."""
    shape, ranks = find_shape(model), 1
    while ranks < MOST_RANKS:
        group = RankGroup(ranks, gpu_peer_link(find_gpu(gpu)))
        if held_bytes(shape, group) <= usable_bytes(find_gpu(gpu).times(ranks)):
            break
        ranks *= 2
    return ranks


@cache
def _parser() -> argparse.ArgumentParser:
    return build_parser(["plan"])


def _case(words: list[str]) -> tuple[PlanCase, int | None]:
    """Return the plan's inputs, with ranges, and the number of tokens in a range."""
    case, ranges = PlanCase.of(_parser().parse_args(words)), RangeVariant()
    found = ranges.figures(case)
    return case.with_planner(ranges.planner(case, found)), found.kv_shard_tokens


def _figures(case: PlanCase) -> Entry:
    plan, alone = case.plan, case.inputs.server.best(limits=case.limits) if case.inputs.server else None
    verdict, prices = judge(plan, alone, case.planner.prices, case.limits), case.inputs.list_prices
    other = alone.service() if alone else None
    return {
        "users": plan.in_flight,
        "tpot_ms": rounded(plan.step_seconds * 1e3),
        "ttft_seconds": rounded(plan.ttft_seconds),
        "alone_tpot_ms": rounded(other.tpot_seconds * 1e3) if other else None,
        "alone_ttft_seconds": rounded(other.ttft_seconds) if other else None,
        "prices": [prices.gpu_per_hour, prices.cpu_host_per_hour],
        "mini_batch_size": plan.mini_batch_size,
        "in_flight": plan.in_flight,
        "num_r_workers": plan.num_r_workers,
        "total_r_workers": plan.total_r_workers,
        "num_hosts": plan.num_hosts,
        "step_ms": rounded(plan.step_seconds * 1e3),
        "tokens_per_second": rounded(plan.output_tokens_per_second),
        "sequence_seconds": rounded(plan.sequence_seconds),
        "bottleneck": plan.bottleneck,
        "alone": rounded(alone.output_tokens_per_second) if alone else None,
        "alone_batch": alone.max_batch_size if alone else None,
        "use_fastdecode": verdict.use_fastdecode,
        "verdict": verdict.sentence,
        "candidates": [
            [row.num_r_workers, row.num_hosts, rounded(row.step_seconds * 1e3), rounded(row.output_tokens_per_second),
             int(row.fits_memory)]
            for row in plan.candidates
        ],
    }  # fmt: skip


def rounded(value: float) -> float:
    """Return the number rounded to ``NUM_DIGITS`` significant digits."""
    return float(f"{value:.{NUM_DIGITS}g}")
