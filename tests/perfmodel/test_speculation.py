"""Drafts in plans and simulations: the formulas agree with sums, and the scheduler runs in simulated time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.drafting import AlwaysMost
from helpers.hardware import LIMITS, PlainMachine

from fastdecode.cli.main import main
from fastdecode.core.metrics import StepRecord
from fastdecode.core.placing import Placing
from fastdecode.core.protocols import DraftPolicy
from fastdecode.perfmodel.equations import tokens_per_verification
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.cli.variants.speculative_decoding import plan_speculation
from fastdecode.perfmodel.lab.draft_times import DraftCost, Drafting, row_share
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.lab.simulate import SimulatedDrafter, SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.sizing import Workload
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.perfmodel.storage_costs import StorageCosts
from fastdecode.scheduler import SCHEDULES, Scheduler
from fastdecode.scheduler.policy.draft_policy import BalancedDrafts

NAMES = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452"]
SIZES = ["--random-input-len", "512", "--random-output-len", "128", "--num-prompts", "64", "--max-num-seqs", "64"]
TOO_DEEP = '{"method": "early_exit", "num_layers": 32, "num_speculative_tokens": 3}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_tokens_of_a_verification(drafts: int, rate: float) -> None:
    """One token always comes, and draft j comes where it and all drafts before it are accepted."""
    expected = 1 + sum(rate**depth for depth in range(1, drafts + 1))
    assert tokens_per_verification(drafts, rate) == pytest.approx(expected)


def test_accepted_drafts_are_as_many_as_the_rate_says() -> None:
    drafter = SimulatedDrafter(Drafting(4, 0.7, DraftCost()), 1)
    drafts = {each: [0] * 4 for each in range(20_000)}
    found = drafter.accepted(drafts)
    assert 1 + np.mean(list(found.values())) == pytest.approx(tokens_per_verification(4, 0.7), rel=0.02)


def run(rate: float, policy: DraftPolicy | None, machine: PlainMachine | SplitMachine, **cost: float) -> Simulator:
    """Run eight requests of 10 + 25 tokens in simulated time, with drafts accepted at ``rate``."""
    limits = replace(LIMITS, num_speculative_tokens=4)
    drafter = SimulatedDrafter(Drafting(4, rate, DraftCost(**cost), 0.25), len(limits.num_blocks))  # type: ignore[arg-type]
    steps: list[StepRecord] = []
    scheduler = Scheduler(SCHEDULES["stall-free"], limits, draft_policy=policy)
    simulator = Simulator(scheduler, machine, steps.append, drafter=drafter if policy else None)
    requests = [SimulatedRequest([0] * 10, 25, max_tokens=40 if i == 3 else None) for i in range(8)]
    simulator.run(requests)
    assert [len(request.token_seconds) for request in requests] == [25] * 8
    assert sum(step.num_output_tokens for step in steps) == 8 * 25
    assert all(np.all(np.diff(request.token_seconds) >= 0) for request in requests)
    assert [worker.free for worker in scheduler.snapshot().r_workers] == list(limits.num_blocks)
    simulator.steps = steps  # type: ignore[attr-defined]
    return simulator


@pytest.mark.parametrize(("rate", "num_decodes"), [(0.0, 24), (1.0, 5)])
def test_steps_of_a_second_become_fewer(rate: float, num_decodes: int) -> None:
    """The 24 tokens after the first take 24 steps where all drafts are rejected, and 5 where all are accepted."""
    plain, drafting = run(rate, None, PlainMachine()), run(rate, AlwaysMost(), PlainMachine())
    assert drafting.num_steps == plain.num_steps - 24 + num_decodes
    assert drafting.now_seconds == drafting.num_steps
    counts = drafting.scheduler.statistics.drafts.figures()
    assert counts["acceptance_rate"] == rate


def test_a_cache_is_read_once_for_all_rows() -> None:
    """A KV token takes a second, each row beyond the first a quarter of it, and drafting takes time of its own."""
    found = run(0.0, AlwaysMost(), PlainMachine(0.0, 0.0, 1.0), sequence_seconds=1000.0)
    step = next(step for step in found.steps if step.num_tokens == 8 * 5)  # type: ignore[attr-defined]
    contexts = sum(step.kv_loads) - 8 * 5
    assert step.s_seconds + step.wait_seconds == pytest.approx(sum(step.kv_loads) + 0.25 * 4 * contexts)
    assert step.host_seconds == 8 * 1000.0


def test_the_balance_in_simulated_time() -> None:
    """Drafts use the S-worker's spare time where R limits, and lose nothing where S limits."""

    def seconds(rate: float, r_seconds: float, drafting: bool) -> float:
        s_part = MeasuredSPart((1, 1000), (1e-3, 1.0), (1e-9, 1e-9))
        model = StepModel(4, s_part, RPart(r_seconds), num_r_workers=2)
        return run(rate, BalancedDrafts(4, 2) if drafting else None, SplitMachine(model)).now_seconds

    assert seconds(0.9, 2e-3, False) > 1.2 * seconds(0.9, 2e-3, True)
    for rate in (0.0, 0.9):
        assert seconds(rate, 1e-6, False) > 0.97 * seconds(rate, 1e-6, True)


def planner(r_seconds: float) -> Planner:
    return Planner(Workload(2048.0, 1024.0), 4, MeasuredSPart((1, 2048), (1e-3, 3e-3), (0.0, 0.0)), RPart(r_seconds))


def test_fewer_r_workers_suffice() -> None:
    """No R-worker is saved where no draft is accepted or drafts are dear; about half are saved at 80 %."""
    each = planner(1e-6)
    plan = each.plan(64)
    assert plan.num_r_workers > 40
    found = {rate: plan_speculation(each, plan, Drafting(4, rate, DraftCost(), 0.04)) for rate in (0.0, 0.5, 0.8)}
    assert (found[0.0].num_draft_tokens, found[0.0].saved_r_workers, found[0.0].gain) == (0, 0, 1.0)
    assert 0 < found[0.5].saved_r_workers < found[0.8].saved_r_workers
    assert 0.3 < found[0.8].num_r_workers / plan.num_r_workers < 0.55
    for rate in (0.5, 0.8):
        assert found[rate].output_tokens_per_second >= plan.output_tokens_per_second * (1 - 1e-6)
        assert found[rate].gain >= 1.0
    dear = plan_speculation(each, plan, Drafting(4, 0.8, DraftCost(1.0), 0.04))
    assert (dear.num_draft_tokens, dear.saved_r_workers) == (0, 0)


def test_drafts_over_ranges_and_copies_cost_what_these_cost() -> None:
    """A plan with drafts, none of which is accepted, costs what the plan without drafts costs."""
    costs = StorageCosts.of(BUILT_IN["llama-7b"], RPart(1e-6))
    each = replace(planner(1e-6), placing=Placing(512, 2), storage=costs)
    plan = each.plan(64)
    found = plan_speculation(each, plan, Drafting(4, 0.0, DraftCost(), 0.04))
    assert found.num_draft_tokens == 0
    same = each.candidate(64, found.num_r_workers)
    assert found.output_tokens_per_second == pytest.approx(same.output_tokens_per_second, rel=1e-12)
    assert same.step_seconds > planner(1e-6).candidate(64, found.num_r_workers).step_seconds


def test_rows_of_grouped_queries_cost_more() -> None:
    """Five rows of groups of 4 query heads take 2.64 times as long as one, as measured; of one head, hardly longer."""
    assert [row_share(group) for group in (1, 4, 64)] == [0.04, pytest.approx(0.41), 1.0]


def test_a_plan_says_how_many_fewer_suffice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    flags = ["--seq-len", "4096", "--mini-batch-size", "64", "--speculative-config", NGRAM, "--acceptance-rate", "0.7"]
    assert main(["plan", *NAMES, *flags, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    drafts = found["speculation"]
    assert drafts["num_r_workers"] + drafts["saved_r_workers"] == found["num_r_workers"]
    assert drafts["saved_r_workers"] > 0
    text = capsys.readouterr().out
    assert f"{drafts['num_r_workers']} R-worker(s), {drafts['saved_r_workers']} fewer than without" in text


def test_a_plan_says_where_drafts_bring_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seq-len", "4096", "--mini-batch-size", "64", "--speculative-config", NGRAM, "--acceptance-rate", "0"]
    assert main(["plan", *NAMES, *flags]) == 0
    text = capsys.readouterr().out
    assert "where 0% are accepted, they save no R-worker" in text and "they add no tokens/s" in text
    assert "fewer than without" not in text


@pytest.mark.parametrize(
    "config",
    [
        NGRAM,
        '{"method": "early_exit", "num_layers": 4, "num_speculative_tokens": 3}',
        '{"method": "draft_model", "model": "llama-7b", "num_speculative_tokens": 3}',
    ],
)
def test_simulate_counts_drafts(config: str, tmp_path: Path) -> None:
    path = tmp_path / "simulation.json"
    flags = ["--num-r-workers", "1", "--speculative-config", config, "--acceptance-rate", "0.8"]
    assert main(["simulate", *NAMES, *SIZES, *flags, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["total_output_tokens"] == 64 * 128
    drafts = found["speculative"]
    assert 0 < drafts["accepted_tokens"] < drafts["drafted_tokens"]
    assert {"acceptance_rate", "mean_accepted_length"} <= set(drafts)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--acceptance-rate", "0.5"], "acceptance_rate describes draft tokens: it needs --speculative-config"),
        (["--speculative-config", NGRAM], "give --acceptance-rate too"),
        (["--speculative-config", NGRAM, "--acceptance-rate", "1.5"], "acceptance_rate must be from 0 to 1, not 1.5"),
        (["--speculative-config", '{"method": "eagle"}', "--acceptance-rate", "1"], "method must be one of"),
        (
            ["--acceptance-rate", "1", "--speculative-config", TOO_DEEP],
            r"num_layers (32) must be below the model's 32",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_cannot_be_is_refused(
    command: str, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", "--seq-len", "1024"] if command == "plan" else ["simulate", *SIZES]
    assert main([*given, *NAMES, *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_a_gpu_alone_has_no_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-r-workers", "0", "--speculative-config", NGRAM, "--acceptance-rate", "0.5"]
    assert main(["simulate", *SIZES, "--model", "mistral-7b", "--gpu", "a100", *flags]) == 2
    assert "a GPU alone is simulated without drafts" in capsys.readouterr().err
