"""Sequences in ranges: partial results and their cost, and what plans and simulations make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.cli.main import main
from fastdecode.cluster.wire.payload import row_counts
from fastdecode.core.metrics import StepRecord
from fastdecode.core.placing import WHOLE, Placing
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.simulate import SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.load import NO_RANGES, Load, RangeParts, mean_parts
from fastdecode.perfmodel.stages import MeasuredSPart, RPart, Transport
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.perfmodel.storage_costs import StorageCosts
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

SHAPE = BUILT_IN["llama-3-8b"]
COSTS = StorageCosts.of(SHAPE)
S_SECONDS, R_SECONDS, LINK = 1e-3, 1e-7, 1e9
PLAN = ["--model", "llama-3-8b", "--gpu", "a10", "--cpu", "epyc-7452"]


def model(num_r_workers: int, **more: object) -> StepModel:
    transport = Transport(SHAPE.attending_row_bytes, (LINK,))
    s_part, r_part = MeasuredSPart((1,), (S_SECONDS,), (0.0,)), RPart(R_SECONDS)
    return StepModel(4, s_part, r_part, num_r_workers, 2, transport, storage=COSTS, **more)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2047), st.integers(1, 3)), min_size=1, max_size=4))
def test_what_is_asked_and_answered_is_what_r_workers_count(sequences: list[tuple[int, int, int]]) -> None:
    """The counted ranges, tail tokens and rows agree with the plans that R-workers get."""
    chunks = []
    for number, (closed, cached, rows) in enumerate(sequences):
        base, rows = closed * 2048, min(rows, 2048 - cached)
        reads = tuple((index % 3, 100 * number + index + 1000, 2048 * index) for index in range(closed))
        chunks.append(Chunk(number, number % 3, base + cached, [1] * rows, base=base, reads=reads))
    step = ScheduledStep((MiniBatch.sorted([MiniBatch.of([chunk]) for chunk in chunks]),), ((), (), ()))
    counts = [row_counts(spans) for worker in step.to_step_plan().workers for spans in worker.mini_batches]
    load = Load.of(step, 0, 0)
    assert load.partials == sum(count.partials for count in counts)
    assert load.reads == sum(chunk_rows(chunk) for chunk in chunks)


def chunk_rows(chunk: Chunk) -> int:
    return len(chunk.token_ids) * len(chunk.reads)


def test_a_step_with_ranges_by_hand() -> None:
    """A step has 8 reads and 10 partial results; link bytes, R-workers' rows, and the S-worker's merges are by hand."""
    plain, parts = model(4).stages(Load.decode(2, 8192)), RangeParts(8, 10)
    found = model(4).stages(Load.decode(2, 8192).with_ranges(parts))
    query, partial = 32 * 128 * 2, 32 * 130 * 4
    assert (COSTS.query_bytes, COSTS.partial_bytes) == (query, partial)
    assert found.trip - plain.trip == pytest.approx((8 * query + 10 * partial) / 2 / LINK)
    assert found.hop - plain.hop == pytest.approx((8 * query + 10 * partial) / 2 / LINK)
    copied = (4 + 1) * query + 5 * partial  # A mini-batch copies its rows' own queries, too.
    assert found.s_part - plain.s_part == pytest.approx(30e-6 + 5 * 32 * 28e-9 + copied / 12e9)
    slow = replace(model(4), storage=StorageCosts.of(SHAPE, slowness=2.0)).stages(
        Load.decode(2, 8192).with_ranges(parts)
    )
    assert slow.s_part - plain.s_part == pytest.approx(2 * (found.s_part - plain.s_part))
    assert found.r_part == plain.r_part  # The time of a single row is not known.
    assert model(4).stages(Load.decode(2, 8192).with_ranges(NO_RANGES)) == plain


def test_the_mean_step_of_sequences_in_ranges() -> None:
    """Tails of one to four splits have 1, 1, 2 and 1 partial results."""
    assert mean_parts(10, 2047, Placing(2048)) == NO_RANGES == mean_parts(10, 1e9, WHOLE)
    assert mean_parts(10, 5000, Placing(2048)) == (20, 10 * (2 + 1.25))


def imbalance(steps: list[StepRecord], num_sequences: int) -> float:
    steady = [step for step in steps if step.is_decode and step.num_output_tokens == num_sequences]
    seconds = np.array([step.r_seconds for step in steady])
    return float(seconds.max(axis=1).sum() / seconds.mean(axis=1).sum())


@pytest.mark.parametrize("num_r_workers", [2, 8])
def test_a_long_sequence_beside_short_ones_is_shared(num_r_workers: int) -> None:
    """The live scheduler shares 32,768 tokens among R-workers, beside 64 times 512, so that loads are even."""
    limits = Limits(
        max_num_seqs=65, max_num_batched_tokens=8192, num_mini_batches=2, scratch_tokens=1 << 40, max_model_len=40000,
        block_size=32, num_blocks=(1 << 20,) * num_r_workers, bandwidths=(1.0,) * num_r_workers, prefix_caching=False,
        placing=Placing(4096),
    )  # fmt: skip
    steps: list[StepRecord] = []
    simulator = Simulator(Scheduler(SCHEDULES["stall-free"], limits), SplitMachine(model(num_r_workers)), steps.append)
    simulator.run([SimulatedRequest([0] * length, 64) for length in (32768, *[512] * 64)])
    assert imbalance(steps, 65) <= 1.1


def test_plan_says_which_sequences_need_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sequences are split into ranges for memory, for time, or where asked; else not."""

    def ranges(*flags: str) -> tuple[int | None, str]:
        path = tmp_path / "plan.json"
        assert main(["plan", *PLAN, "--output-json", str(path), *flags]) == 0
        found = json.loads(path.read_text())["ranges"]
        return found["kv_shard_tokens"], found["reason"]

    long = ["--seq-len", "131072", "--prompt-len", "130000"]
    assert ranges("--seq-len", "1024", "--mini-batch-size", "64") == (None, "")
    assert ranges(*long, "--mini-batch-size", "2", "--kv-cache-memory", "8GiB") == (65536, "memory")
    assert "does not fit one R-worker's 65536 tokens" in capsys.readouterr().out
    tokens, reason = ranges(*long, "--mini-batch-size", "1", "--num-mini-batches", "1", "--prompt-len", "1000")
    assert reason == "time" and tokens and tokens >= 4096
    assert ranges(*long, "--mini-batch-size", "8", "--kv-shard-tokens", "8192") == (8192, "asked for")
    assert main(["plan", *PLAN, *long, "--kv-cache-memory", "1MB"]) == 1
    assert "fewer than one sequence" in capsys.readouterr().err


def test_simulate_takes_ranges(tmp_path: Path) -> None:
    """The one long sequence of the trace is simulated on R-workers none of which could hold it."""
    trace, path = tmp_path / "trace.jsonl", tmp_path / "simulated.json"
    lines = [{"timestamp": 0, "input_length": length, "output_length": 8} for length in (9000, 200, 200)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--dataset-name", "trace", "--dataset-path", str(trace), "--num-r-workers", "4", "--max-num-seqs", "4"]
    flags += ["--kv-cache-memory", "640MiB", "--output-json", str(path)]  # 640 MiB hold 5,120 tokens.
    busiest = []
    for more in ([], ["--kv-shard-tokens", "1024"]):
        assert main(["simulate", *PLAN, *flags, *more]) == 0
        found = json.loads(path.read_text())
        assert found["num_requests"] == 3
        busiest.append(found["breakdown"]["r_seconds"] / found["breakdown"]["r_seconds_mean"])
    assert busiest[1] < busiest[0]
    assert main(["simulate", *PLAN, *flags, "--kv-shard-tokens", "1000"]) == 2
