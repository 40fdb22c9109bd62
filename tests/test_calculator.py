"""The calculator's equations in JavaScript against the planner's own, for random machines, contexts and limits."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import PATIENCE_SECONDS

from fastdecode.cli.main import build_parser
from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase
from fastdecode.perfmodel.presets import CPU_HOSTS, GPUS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import plan_data  # noqa: E402
import plan_tables  # noqa: E402

PLANNER = ROOT / "docs" / "assets" / "planner.js"
WEIGHTS = plan_tables.AXES["weights"]
MODELS = tuple(model for model in plan_tables.MODELS if plan_data.is_plain(model))


def drawn(number: int) -> list[dict[str, Any]]:
    """Return random choices: presets and machines in numbers, with words as people type them."""
    rng = random.Random(0)

    def gpu() -> str:
        numbers = f"{rng.randint(200, 8000)}GB/s:{rng.randint(40, 2000)}TFLOPS:{rng.choice((16, 24, 32, 80, 141))}GiB"
        return rng.choice([*GPUS, numbers, f"{numbers}:pcie{rng.choice((16, 32, 64))}GB/s"])

    def cpu() -> str:
        numbers = f"{rng.randint(30, 900)}GB/s:{rng.randint(2, 128)}cores:{rng.choice((32, 64, 256, 1024))}GiB"
        return rng.choice([*CPU_HOSTS, numbers, numbers])

    return [
        {
            "model": rng.choice(MODELS), "gpu": gpu(), "cpu": cpu(), "weights": rng.choice(WEIGHTS),
            "seq_len": rng.choice((512, 4096, 7000, 32768)), "tpot": rng.choice(("25", "100", "300", "inf")),
        }
        for _ in range(number)
    ]  # fmt: skip


def planned(choice: dict[str, Any]) -> dict[str, Any] | None:
    """Return the planner's figures; None where it has no plan. Ranges are left out: they need the engine's rounding."""
    words = [
        "plan",
        "--model",
        choice["model"],
        "--gpu",
        choice["gpu"],
        "--cpu",
        choice["cpu"],
        "--tpot",
        choice["tpot"],
    ]
    words += ["--seq-len", str(choice["seq_len"]), "--prompt-len", str(choice["seq_len"] * 7 // 8)]
    words += [] if choice["weights"] == "plain" else ["--weights", choice["weights"]]
    try:
        case = PlanCase.of(build_parser(["plan"]).parse_args(words))
    except (PlanError, ConfigError):
        return None
    plan, server = case.plan, case.inputs.server
    alone = server.best(limits=case.limits) if server else None
    assert alone is not None
    return {
        "ranks": plan.tensor_parallel_size, "users": plan.in_flight, "mini_batch_size": plan.mini_batch_size,
        "num_r_workers": plan.num_r_workers, "num_hosts": plan.num_hosts, "bottleneck": plan.bottleneck,
        "tpot_ms": plan.step_seconds * 1e3, "ttft_seconds": plan.ttft_seconds,
        "tokens_per_second": plan.output_tokens_per_second, "keeps_limits": case.keeps_limits,
        "alone": alone.output_tokens_per_second or None, "alone_batch": alone.max_batch_size or None,
        "alone_ttft_seconds": alone.ttft_seconds,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to run the calculator's script")
def test_the_page_s_equations_are_the_planner_s() -> None:
    choices = drawn(60)
    data = plan_data.data(MODELS, WEIGHTS, build_parser(["plan"]))
    script = f"""
      const {{ livePlan }} = require({json.dumps(str(PLANNER))});
      const data = {json.dumps(data)};
      const found = {json.dumps(choices)}.map((each) => {{
        try {{ return livePlan(data, each); }} catch (error) {{ return {{ error: String(error) }}; }} }});
      console.log(JSON.stringify(found));"""
    ran = subprocess.run(
        ["node", "-"], input=script, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    compared = 0
    for choice, live in zip(choices, json.loads(ran.stdout), strict=True):
        own = planned(choice)
        assert (own is None) == ("error" in live), (choice, own, live)
        if own is None:
            assert live["error"].startswith("RangeError: "), (choice, live)
            continue
        compared += 1
        for name, value in own.items():
            wanted = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            assert live[name] == wanted, (name, choice)
    assert compared > 30
