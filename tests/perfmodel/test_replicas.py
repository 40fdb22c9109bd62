"""Two copies of each sequence: their cost, the cost of a loss, and how evenly the live scheduler loads R-workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdecode.cli.main import main
from fastdecode.core.metrics import PoolChanges, StepRecord
from fastdecode.core.placing import Placing
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.lab.simulate import SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.sizing import Workload
from fastdecode.perfmodel.stages import MeasuredSPart, RPart, Transport
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.perfmodel.storage_costs import APPENDED_TOKENS, StorageCosts
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

SHAPE = BUILT_IN["llama-7b"]
S_SECONDS, R_SECONDS, PCIE, LINK = 1e-3, 1e-7, 4e9, 1e9
COSTS = StorageCosts.of(SHAPE, RPart(R_SECONDS))
TWICE = Placing(copies=2)
TRANSPORT = Transport(SHAPE.attending_row_bytes, (PCIE, LINK))
S_PART = MeasuredSPart((1,), (S_SECONDS,), (0.0,))
NAMES = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--seq-len", "1024", "--mini-batch-size", "1024"]
LONG = ["--seq-len", "16384", "--prompt-len", "12288", "--mini-batch-size", "16"]
WHAT = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452"]
SIZES = ["--random-input-len", "16", "--random-output-len", "64", "--random-range-ratio", "0.5", "--num-prompts", "192"]


def planner(**more: Any) -> Planner:
    figures: dict[str, Any] = {"workload": Workload(1024), "storage": COSTS, "transport": TRANSPORT} | more
    return Planner(num_layers=32, s_part=MeasuredSPart((1, 1024), (1e-3, 7e-3), (0.0, 0.0)), r_part=RPart(R_SECONDS),
                   **figures)  # fmt: skip


def test_what_is_copied_by_hand() -> None:
    """Only keys and values are copied: they cross the last hop once more, and another R-worker stores them."""
    model = StepModel(4, S_PART, RPart(R_SECONDS), 4, 2, TRANSPORT, storage=COSTS)
    plain, found = model.stages(Load.decode(64, 8192)), model.stages(Load(64, 64, 8192, copied_rows=40))
    key_values = 2 * 32 * 128 * 2
    assert found.trip - plain.trip == pytest.approx(20 * key_values / LINK)
    assert (plain.hop, found.hop) == (pytest.approx(32 * 2 * key_values / LINK), plain.hop + 20 * key_values / LINK)
    assert found.r_part - plain.r_part == pytest.approx(20 / 4 * APPENDED_TOKENS * R_SECONDS)
    assert found.s_part == plain.s_part
    # The time was measured with attention included.
    assert StorageCosts.of(SHAPE, RPart(R_SECONDS, 0.0, 1e-6)).append_seconds == 1e-6
    machine = SplitMachine(model)
    one, two = (machine.cost(Load(64, 64, 8192, copied_rows=rows), [2048] * 4) for rows in (0, 40))
    assert two.transfer_seconds - one.transfer_seconds == pytest.approx(8 * 20 * key_values / LINK)
    assert two.r_seconds - one.r_seconds == pytest.approx(np.full(4, 8 * 20 / 4 * APPENDED_TOKENS * R_SECONDS))
    assert Transport(100.0).stage_seconds(8, 1.0, 1.0) == Transport(100.0).trip_seconds(8, 1.0, 1.0) == 0.0


def test_two_copies_take_twice_the_memory() -> None:
    """1,081,344 tokens at the peak need twice the memory at 90,000 per R-worker; each token is still read once."""
    one, two = (planner(capacity_tokens=90_000.0, placing=Placing(copies=number)).plan(1024) for number in (1, 2))
    assert (one.num_r_workers, two.num_r_workers, two.r_workers_set_by) == (13, 25, "memory")
    assert (one.kv_load_limit, one.kv_replicas, two.kv_replicas) == (two.kv_load_limit, 1, 2)
    assert planner(placing=TWICE).plan(2).num_r_workers == 2  # Two copies need two R-workers at least.
    stored = 2 * APPENDED_TOKENS * R_SECONDS  # One R-worker stores each row's copy, beside 512 tokens that are read.
    exact = [
        planner(placing=Placing(copies=number), transport=Transport()).balanced_r_workers(1024) for number in (1, 2)
    ]
    assert exact[1] / exact[0] == pytest.approx(1 + stored / 2 / (512 * R_SECONDS))
    assert planner(placing=TWICE).candidate(64, 1).step_seconds == planner().candidate(64, 1).step_seconds
    # 500 of 600 prompt tokens are shared, 100 come out. At the peak 512 sequences hold 200 tokens of their own, and
    # their second copies 700; each R-worker has room for 4,500 beside the prefix.
    shared = planner(
        workload=Workload(700, 600, shared_prefix_len=500), interval_steps=100, capacity_tokens=5000.0, placing=TWICE
    )
    assert shared.memory_r_workers(512) == -(-512 * (200 + 700) // 4500)
    # Half of the sequences read the prefix themselves.
    assert shared.mean_step(512, 4)[1] == 512 * (150 + 250) + 2 * 4 * 500


def test_plan_says_what_copies_and_a_loss_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*flags: str) -> tuple[dict[str, Any], str]:
        path = tmp_path / "plan.json"
        assert main(["plan", *NAMES, "--gpu-price", "1", "--cpu-price", "0.5", *flags, "--output-json", str(path)]) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    (one, text), (two, text_two) = found(), found("--kv-replicas", "2")
    costs = one["replicas"]
    for name in ("num_r_workers", "num_hosts", "output_tokens_per_second", "price_per_million_tokens"):
        assert (costs["one"][name], costs["two"][name]) == (one[name], two[name])
    assert two["replicas"]["one"] == costs["one"] and two["replicas"]["two"] == costs["two"]
    assert (costs["one"]["memory_r_workers"], costs["two"]["memory_r_workers"]) == (6, 12)
    assert costs["link_growth"] == 0.5  # q, k, v and o cross the link, and then k and v again.
    assert costs["recomputed_tokens"] == pytest.approx(2048 * 512 / one["num_r_workers"])
    assert costs["recompute_seconds"] > 1 and two["replicas"]["recompute_seconds"] == 0
    assert (
        "a second (--kv-replicas 2) takes twice the memory" in text
        and "50% more bytes on the link" in text
        and "to be computed again" in text
    )
    assert "nothing is computed again" in text_two and two["kv_replicas"] == 2
    assert main(["plan", *NAMES, "--kv-replicas", "2", "--emit", "mpirun"]) == 0
    assert " --kv-replicas 2 " in capsys.readouterr().out


def test_plan_takes_ranges_and_copies_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranges and copies cost what each costs alone; a loss stops every sequence that has a range on the R-worker."""

    def found(*flags: str) -> dict[str, Any]:
        path = tmp_path / "plan.json"
        assert main(["plan", *NAMES[:-4], *LONG, *flags, "--output-json", str(path)]) == 0
        return json.loads(path.read_text())

    ranges, copies = ["--kv-shard-tokens", "4096"], ["--kv-replicas", "2"]
    one, two, both = found(*ranges), found(*copies), found(*ranges, *copies)
    assert both["ranges"]["kv_shard_tokens"] == one["ranges"]["kv_shard_tokens"] == 4096
    assert both["num_r_workers"] == two["num_r_workers"] >= one["num_r_workers"]
    # Ranges cost merges, and even out what the slowest R-worker reads in steps without prompts
    assert both["step_seconds"] != two["step_seconds"] == pytest.approx(both["step_seconds"], rel=0.05)
    assert both["replicas"]["two"]["output_tokens_per_second"] == both["output_tokens_per_second"]
    lost = one["replicas"]["lost_sequences"]
    assert lost == pytest.approx(min(32, 32 * 4 / one["num_r_workers"]))  # 14,336 tokens, the mean, are four ranges.
    assert both["replicas"]["lost_sequences"] == 0
    assert "of 4096 tokens (--kv-shard-tokens)" in capsys.readouterr().out
    assert main(["plan", *NAMES[:-4], *LONG, *ranges, *copies, "--emit", "mpirun"]) == 0
    assert " --kv-shard-tokens 4096 --kv-replicas 2 " in capsys.readouterr().out
    # One R-worker holds 4,096 tokens.
    assert found(*copies, "--kv-cache-memory", "2GiB")["ranges"]["reason"] == "memory"
    assert main(["plan", *NAMES, "--kv-shard-tokens", "1000"]) == 2
    assert "kv_shard_tokens must be 512 times a power of two" in capsys.readouterr().err


def test_simulated_copies_even_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With mixed lengths on 8 R-workers of 4 hosts every sequence has two copies, and every steady step is even."""
    path, reports = tmp_path / "simulated.json", []
    for number in ("1", "2"):
        flags = [*SIZES, "--num-r-workers", "8", "--max-num-seqs", "64", "--kv-replicas", number]
        assert main(["simulate", *WHAT, *flags, "--output-json", str(path)]) == 0
        reports.append(json.loads(path.read_text()))
    one, two = reports
    assert one["total_output_tokens"] == two["total_output_tokens"]
    assert (one["two_copies_share"], two["two_copies_share"], two["copies_made"]) == (None, 1.0, 0)
    assert two["steady"]["imbalance_max"] <= 1.05 < one["steady"]["imbalance_max"]
    assert "100.0% of the sequences had two" in capsys.readouterr().out
    transfers = [each["breakdown"]["transfer_seconds"] / each["breakdown"]["wall_seconds"] for each in reports]
    assert transfers[1] > 1.1 * transfers[0]
    assert main(["simulate", *WHAT, *SIZES, "--kv-replicas", "2", "--kv-shard-tokens", "1024"]) == 0
    assert main(["simulate", *WHAT[:4], *SIZES, "--kv-replicas", "2", "--num-r-workers", "0"]) == 2
    assert "two copies need two R-workers, and there is none" in capsys.readouterr().err


def limits(**more: Any) -> Limits:
    """Return limits of four R-workers that are said to be alike."""
    figures: dict[str, Any] = {
        "max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_mini_batches": 2, "scratch_tokens": 1 << 40,
        "max_model_len": 400, "block_size": 16, "num_blocks": (1 << 20,) * 4, "bandwidths": (1.0,) * 4,
        "prefix_caching": False, "placing": TWICE,
    }  # fmt: skip
    return Limits(**figures | more)


def test_sequences_with_a_cached_prefix_begin_with_two_copies() -> None:
    """All prompts are alike, so most begin with a prefix that is cached twice, and none is copied between steps."""
    machine = SplitMachine(StepModel(4, S_PART, RPart(1e-6), 4), seconds_per_moved_token=1e-6)
    steps: list[StepRecord] = []
    simulator = Simulator(Scheduler(SCHEDULES["stall-free"], limits(prefix_caching=True)), machine, steps.append)
    simulator.run([SimulatedRequest([0] * 101, 250) for _ in range(64)])
    assert simulator.scheduler.statistics.prefix_hit_tokens > 32 * 96
    assert simulator.changes == PoolChanges()
    assert min(step.pool.twice for step in steps[10:100]) == 64


def test_sequences_that_lost_a_copy_get_another_between_steps() -> None:
    """The first R-worker is lost in the 50th step, and copies are made again between later steps."""
    machine = SplitMachine(StepModel(4, S_PART, RPart(1e-6), 4), seconds_per_moved_token=1e-6)
    scheduler, copies = Scheduler(SCHEDULES["stall-free"], limits()), []

    def note(step: StepRecord) -> None:
        copies.append(step.pool[1:])
        if len(copies) == 50:
            scheduler.controls_alone()
            scheduler.members.lost(0)

    simulator = Simulator(scheduler, machine, note)
    simulator.run([SimulatedRequest([0] * 101, 250) for _ in range(64)])
    assert copies[48] == copies[150] == (0, 64)
    assert 16 <= simulator.changes.doubled < 64


def test_a_slow_r_worker_is_relieved() -> None:
    """With a first R-worker of half the speed, late steps are within a tenth of the ideal share's."""
    speeds = np.array([0.5, 1.0, 1.0, 1.0])
    steps: list[StepRecord] = []
    machine = SplitMachine(StepModel(4, S_PART, RPart(1e-6), 4), speeds=tuple(speeds.tolist()))
    simulator = Simulator(Scheduler(SCHEDULES["stall-free"], limits()), machine, steps.append)
    simulator.run([SimulatedRequest([0] * 100, 250) for _ in range(64)])
    late = [step for step in steps if step.num_output_tokens == 64][100:]
    ideals = [
        machine.cost(Load.decode(64, step.kv_load), (step.kv_load * speeds / speeds.sum()).tolist()).wall_seconds
        for step in late
    ]
    ratios = [step.wall_seconds / ideal for step, ideal in zip(late, ideals, strict=True)]
    assert len(late) > 100 and max(ratios) <= 1.1
