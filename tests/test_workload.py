"""Benchmark workloads, the report's arithmetic, and the transfer time by a step's moments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fastdecode.cluster.pool.routed_rows import transfer_seconds
from fastdecode.core.errors import ConfigError
from fastdecode.core.metrics import MODEL, Event, Interval, Pool, StepRecord
from fastdecode.perfmodel.lab.measure.dataset import WorkloadSpec, make_workload
from fastdecode.perfmodel.lab.measure.plots import typical_decode_step
from fastdecode.perfmodel.lab.measure.throughput_report import (
    ThroughputRun,
    breakdown,
    decode_figures,
    latencies,
    steady_figures,
    summary_lines,
    throughput_report,
)
from fastdecode.scheduler import SchedulerStatistics

VOCAB, LONGEST = 300, 4096


def encode(text: str) -> list[int]:
    """Return one token per character."""
    return list(text.encode())


# Random prompts.


@given(
    st.integers(1, 200),
    st.integers(1, 50),
    st.floats(0, 0.99),
    st.integers(0, 30),
    st.integers(1, 20),
    st.integers(0, 9),
)
def test_random_lengths_are_within_the_ratio(
    input_len: int, output_len: int, ratio: float, prefix_len: int, num_prompts: int, seed: int
) -> None:
    spec = WorkloadSpec("random", None, input_len, output_len, ratio, prefix_len, num_prompts, seed=seed)
    items = make_workload(spec, VOCAB, LONGEST, None)
    assert len(items) == num_prompts
    assert all(item.arrival_seconds == 0 for item in items)
    prefix = items[0].prompt_token_ids[:prefix_len]
    for item in items:
        assert item.prompt_token_ids[:prefix_len] == prefix
        assert all(type(token) is int and 0 <= token < VOCAB for token in item.prompt_token_ids)
        for length, nominal in ((len(item.prompt_token_ids) - prefix_len, input_len), (item.output_len, output_len)):
            assert max(1, math.floor(nominal * (1 - ratio))) <= length <= math.floor(nominal * (1 + ratio))
    assert items == make_workload(spec, VOCAB, LONGEST, None)


def test_the_whole_range_is_drawn_and_seeds_differ() -> None:
    spec = WorkloadSpec(random_input_len=10, random_output_len=4, random_range_ratio=0.5, num_prompts=400)
    items = make_workload(spec, VOCAB, LONGEST, None)
    assert {len(item.prompt_token_ids) for item in items} == set(range(5, 16))
    assert {item.output_len for item in items} == set(range(2, 7))
    assert items[0].prompt_token_ids != items[1].prompt_token_ids
    assert items != make_workload(replace(spec, seed=1), VOCAB, LONGEST, None)


def test_arrivals_are_poisson() -> None:
    """Gaps at 50 requests a second have a mean and a standard deviation of 20 ms, as exponential gaps have."""
    spec = WorkloadSpec(random_input_len=1, random_output_len=1, num_prompts=4000, request_rate=50.0)
    arrivals = [item.arrival_seconds for item in make_workload(spec, VOCAB, LONGEST, None)]
    gaps = np.diff([0.0, *arrivals])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.1)
    assert gaps.std() == pytest.approx(0.02, rel=0.1)
    assert (gaps > 0.02).mean() == pytest.approx(math.exp(-1), rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    """Gamma gaps of the same mean have a standard deviation of mean / sqrt(shape)."""
    spec = WorkloadSpec(
        random_input_len=1, random_output_len=1, num_prompts=8000, request_rate=50.0, burstiness=burstiness
    )
    gaps = np.diff([0.0, *(item.arrival_seconds for item in make_workload(spec, VOCAB, LONGEST, None))])
    assert gaps.mean() == pytest.approx(0.02, rel=0.1)
    assert gaps.std() == pytest.approx(0.02 / math.sqrt(burstiness), rel=0.1)


def test_too_long_for_the_model() -> None:
    spec = WorkloadSpec(random_input_len=60, random_output_len=4, random_prefix_len=1, num_prompts=2)
    assert len(make_workload(spec, VOCAB, 65, None)) == 2
    with pytest.raises(ConfigError, match="prompt \\+ output reach 65 tokens, and max_model_len is 64"):
        make_workload(spec, VOCAB, 64, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("random_input_len", 0),
        ("random_output_len", 0),
        ("num_prompts", 0),
        ("random_range_ratio", 1.0),
        ("random_range_ratio", -0.1),
        ("random_range_ratio", math.nan),
        ("random_prefix_len", -1),
        ("request_rate", 0.0),
        ("request_rate", -3.0),
        ("request_rate", math.nan),
        ("burstiness", 0.0),
        ("burstiness", math.inf),
        ("burstiness", math.nan),
    ],
)
def test_bad_flags_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .*, not {value}$"):
        WorkloadSpec(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sharegpt", "custom"])
def test_files_need_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' needs --dataset-path"):
        WorkloadSpec(dataset_name=name)


# Prompts from files.


def turns(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human" if i % 2 == 0 else "gpt", "value": t} for i, t in enumerate(texts)]}


def workload_of(
    path: Path, text: str, name: str, encoder: Callable[[str], list[int]] | None = encode, **spec: Any
) -> list:
    path.write_text(text, encoding="utf-8")
    return make_workload(WorkloadSpec(name, str(path), **spec), VOCAB, 20, encoder)


def test_sharegpt(tmp_path: Path) -> None:
    """The first turn asks and the second answers; one-sided, empty and too long conversations are skipped."""
    talks = [turns("hello", "hi"), turns("alone"), turns("", "hi"), turns("x", ""), turns("x" * 19, "yy"), {"id": 3}]
    talks += [turns("é", "abc", "more", "and more"), turns("x" * 18, "yy"), turns("not", "reached")]
    items = workload_of(tmp_path / "s.json", json.dumps(talks), "sharegpt", num_prompts=3)
    assert [(item.prompt_token_ids, item.output_len) for item in items] == [
        (encode("hello"), 2),
        (encode("é"), 3),
        (encode("x" * 18), 2),
    ]


def test_custom(tmp_path: Path) -> None:
    lines = ['{"prompt": "ab"}', "", '{"prompt": "cde", "output_tokens": 9}', '{"prompt": "f", "output_tokens": 999}']
    items = workload_of(tmp_path / "c.jsonl", "\n".join(lines), "custom", random_output_len=5)
    assert [(item.prompt_token_ids, item.output_len) for item in items] == [(encode("ab"), 5), (encode("cde"), 9)]
    assert [item.prompt for item in items] == ["ab", "cde"]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("sharegpt", "{", "cannot read dataset"),
        ("sharegpt", '{"conversations": []}', "is a JSON list"),
        ("sharegpt", "[]", "no conversation fits max_model_len 20"),
        ("sharegpt", json.dumps([turns("x" * 30, "y")]), "no conversation fits max_model_len 20"),
        ("sharegpt", '[{"conversations": [{"from": "human"}, {"from": "gpt"}]}]', "conversation"),
        ("sharegpt", '[{"conversations": 7}]', "conversation"),
        ("sharegpt", '[{"conversations": [{"value": 1}, {"value": 2}]}]', "conversation"),
        ("custom", "not json", "cannot read dataset"),
        ("custom", '{"text": "x"}', 'every line must be an object with a text "prompt"'),
        ("custom", '["x"]', 'every line must be an object with a text "prompt"'),
        ("custom", '{"prompt": 3}', 'every line must be an object with a text "prompt"'),
        ("custom", '{"prompt": "x", "output_tokens": "many"}', "output_tokens"),
        ("custom", '{"prompt": "x", "output_tokens": null}', "output_tokens"),
        ("custom", "", "fits"),
    ],
)
def test_bad_files(name: str, text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        workload_of(tmp_path / "data", text, name)
    assert "\n" not in str(caught.value) and str(tmp_path / "data") in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot read dataset"):
            make_workload(WorkloadSpec("sharegpt", str(path)), VOCAB, 20, encode)
    (tmp_path / "latin").write_bytes(b'[{"prompt": "\xe9"}]')
    with pytest.raises(ConfigError, match="cannot read dataset"):
        make_workload(WorkloadSpec("custom", str(tmp_path / "latin")), VOCAB, 20, encode)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer was not loaded"):
        workload_of(tmp_path / "s.json", "[]", "sharegpt", encoder=None)


# The report.

STEP = StepRecord(
    is_decode=True,
    overlapped=True,
    num_tokens=8,
    num_output_tokens=8,
    kv_loads=(60, 40),
    wall_seconds=1.0,
    s_seconds=0.5,
    wait_seconds=0.4,
    host_seconds=0.1,
    r_seconds=(0.3, 0.6),
    transfer_seconds=(0.2, 0.05),
    kv_bytes_read=9_000_000_000,
)


def test_breakdown_is_of_the_busiest_worker() -> None:
    """The busiest R-worker of the run counts, not of any one step: 0.3 + 0.9 s against 0.6 + 0.1 s."""
    second = replace(STEP, wall_seconds=2.0, s_seconds=1.5, r_seconds=(0.9, 0.1), transfer_seconds=(0.1, 7.0))
    figures = breakdown([STEP, second], separate_cores=True)
    assert figures == pytest.approx(
        {
            "s_seconds": 2.0,
            "wait_seconds": 0.8,
            "host_seconds": 0.2,
            "wall_seconds": 3.0,
            "r_seconds": 1.2,
            "r_seconds_mean": 0.95,
            "transfer_seconds": 0.3,
            "overlap_efficiency": 2.0 / 3.0,
            "overlap_gain": None,
            "r_read_gb_per_s": 18 / 1.9,
        }
    )
    assert figures["s_seconds"] + figures["wait_seconds"] + figures["host_seconds"] == pytest.approx(
        figures["wall_seconds"]
    )


def test_overlap_efficiency_takes_the_longer_side_and_only_separate_cores() -> None:
    assert breakdown([STEP], separate_cores=True)["overlap_efficiency"] == pytest.approx(0.6)
    assert breakdown([STEP], separate_cores=False)["overlap_efficiency"] is None


def test_overlap_gain_is_of_medians_and_steps_without_overlap_count_nowhere_else() -> None:
    alone = [replace(STEP, overlapped=False, wall_seconds=wall, s_seconds=9.0) for wall in (1.4, 1.5, 90.0)]
    figures = breakdown([STEP, *alone, replace(STEP, wall_seconds=1.2), replace(STEP, wall_seconds=50.0)], True)
    assert figures["overlap_gain"] == pytest.approx(1.5 / 1.2)
    assert figures["s_seconds"] == pytest.approx(1.5)


def test_breakdown_of_nothing() -> None:
    figures = breakdown([], separate_cores=True)
    assert set(figures.values()) == {0.0, None}
    assert figures["overlap_gain"] is None


def test_decode_figures() -> None:
    figures = decode_figures([(i + 1) / 100 for i in range(101)], 808)
    assert figures == pytest.approx(
        {
            "steps": 101,
            "tokens": 808,
            "seconds": 51.51,
            "tokens_per_second": 808 / 51.51,
            "step_seconds_p01": 0.02,
            "step_seconds_p50": 0.51,
            "step_seconds_p99": 1.0,
            "step_seconds_max": 1.01,
        }
    )
    assert set(decode_figures([], 0).values()) == {0}


def output(prompt_len: int, arrival: float, *moments: float) -> RequestOutput:
    completion = CompletionOutput(0, "", tuple(range(len(moments))), "length")
    metrics = RequestMetrics(arrival, moments)
    return RequestOutput(str(arrival), None, [0] * prompt_len, [completion], True, metrics)


OUTPUTS = [output(10, 1.0, 1.5, 1.6, 1.8), output(20, 2.0, 2.1), output(30, 3.0)]


def test_latencies() -> None:
    found = latencies(OUTPUTS)
    assert found["ttft_seconds"] == pytest.approx({"p50": 0.3, "p99": 0.496})
    assert found["tbt_seconds"] == pytest.approx({"p50": 0.15, "p99": 0.199})
    assert latencies([])["tbt_seconds"] == {"p50": 0.0, "p99": 0.0}


def test_r_workers_that_came_and_went_are_in_the_summary() -> None:
    """Two R-workers are there, a third joins, one is lost, a fourth takes its place, and one of the three leaves."""
    there = [replace(STEP, pool=Pool(number)) for number in (2, 3, 2, 3, 2)]
    steps = [*there[:2], replace(there[2], lost_workers=1), *there[3:]]
    report = throughput_report(ThroughputRun(2.0, OUTPUTS, steps), separate_cores=False)
    assert (report["joined_workers"], report["lost_workers"]) == (2, 1)
    assert "R-workers: 2 joined and 1 were lost during the run" in summary_lines(report)
    quiet = throughput_report(ThroughputRun(2.0, OUTPUTS, [STEP, STEP]), separate_cores=False)
    assert quiet["joined_workers"] == 0 and not any("joined" in line for line in summary_lines(quiet))


@pytest.mark.parametrize(("limit", "exceeded"), [(None, False), (100, False), (92, False), (50, True)])
def test_a_found_limit_that_was_not_kept_is_said(limit: int | None, exceeded: bool) -> None:
    run = ThroughputRun(2.0, OUTPUTS, [STEP], kv_load_limit=limit)
    (line,) = (line for line in summary_lines(throughput_report(run, True)) if line.startswith("KV load"))
    assert ("exceeded: starts are only spread" in line) == exceeded and ("limit" in line) == (limit is not None)


def test_the_whole_report() -> None:
    prompt = replace(STEP, is_decode=False, num_tokens=65, num_output_tokens=6, kv_loads=(200, 100), wall_seconds=0.25)
    prompt = replace(prompt, num_prompt_tokens=60)
    run = ThroughputRun(2.0, OUTPUTS, [prompt, STEP, replace(STEP, kv_loads=(80, 120))])
    run.kv_load_limit, run.statistics = 512, SchedulerStatistics(3, 96, 2)
    report = throughput_report(run, separate_cores=False)
    assert (report["num_requests"], report["total_num_tokens"], report["total_output_tokens"]) == (3, 64, 4)
    rates = [report[name] for name in ("requests_per_second", "tokens_per_second", "output_tokens_per_second")]
    assert rates == [1.5, 32.0, 2.0]
    assert report["prefill"] == {"seconds": 0.25, "tokens": 60}
    assert (report["decode"]["steps"], report["decode"]["tokens"]) == (2, 16)
    assert report["breakdown"]["wall_seconds"] == 2.0
    assert (report["prefix_cache"], report["preemptions"]) == ({"queries": 3, "hit_tokens": 96}, 2)
    assert report["kv_load"] == {"peak_tokens": 300, "mean_tokens": 200.0, "limit_tokens": 512}
    lines = list(summary_lines(report))
    assert lines[-1] == "Throughput: 1.50 requests/s, 32.00 total tokens/s, 2.00 output tokens/s"
    assert lines[0] == "Decode: 8.0 tokens/s over 2 steps without prompts, step p50 1000.00 ms, p99 1000.00 ms"
    assert lines[1].startswith(
        "Of decode time: S 50%, waiting for R 40%, host 10.0%   (R-worker busy 60%, transfer 5.0%"
    )
    assert lines[2] == "Prefill: 60 prompt tokens in 0.25 s of steps with prompts"
    assert lines[3] == "KV load: mean 200, peak 300 tokens per step, limit 512"
    assert lines[4] == "Prefix cache: 96 prompt tokens found for 3 requests; 2 preemptions"
    json.dumps(report)


def test_a_run_that_did_nothing_can_be_reported() -> None:
    report = throughput_report(ThroughputRun(), separate_cores=True)
    assert list(summary_lines(report)) == ["Throughput: 0.00 requests/s, 0.00 total tokens/s, 0.00 output tokens/s"]


# Transfer time.


def moments(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


@pytest.mark.parametrize(
    ("submitted", "busy_start", "busy_end", "expected"),
    [
        (moments([1.0]), moments([1.25]), moments([2.0]), 0.25),
        (moments([1.0, 5.0]), moments([1.25, 5.5]), moments([2.0, 6.0]), 0.75),
        # B was submitted at 1.5 but its worker was busy with A until 2: only 2 → 2.125 is transfer.
        (moments([1.0], [1.5]), moments([1.25], [2.125]), moments([2.0], [3.0]), 0.375),
        # The same two, served in the other order than they are listed.
        (moments([1.5], [1.0]), moments([2.125], [1.25]), moments([3.0], [2.0]), 0.375),
        # The worker had no rows of B, nor of A's second layer.
        (moments([1.0, 4.0], [1.5, 4.5]), moments([1.25, 0.0], [0.0, 0.0]), moments([2.0, 0.0], [0.0, 0.0]), 0.25),
        # Clocks that disagree a little never make it negative.
        (moments([1.0]), moments([0.875]), moments([2.0]), 0.0),
        (moments([0.0]), moments([0.0]), moments([0.0]), 0.0),
        (np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)), 0.0),
    ],
)
def test_transfer_seconds(submitted: np.ndarray, busy_start: np.ndarray, busy_end: np.ndarray, expected: float) -> None:
    assert transfer_seconds(submitted, busy_start, busy_end) == expected


def test_the_steady_part_is_from_one_output_after_the_first_start_to_the_last_start() -> None:
    """Steps 4 to 7 of ten are steady, with starts in steps 1, 4 and 7 and 3 tokens each."""
    steps = [
        StepRecord(
            True,
            True,
            2,
            2,
            (10 * i, 0),
            1.0,
            1.0,
            0.0,
            0.0,
            (3.0, 1.0),
            (0.0, 0.0),
            0,
            0,
            int(i in (1, 4, 7)),
            pool=Pool(2),
        )
        for i in range(10)
    ]
    found = steady_figures(steps, 3.0, 77)
    assert found == {
        "seconds": 4.0, "tokens_per_second": 2.0, "mean_kv_tokens": 55.0, "limit_kv_tokens": 77, "imbalance": 1.5,
        "imbalance_max": 1.5, "tpot_seconds": 1.0,
    }  # fmt: skip
    assert steady_figures(steps[:2], 3.0, None)["seconds"] == 0.0


def test_the_step_that_is_drawn_overlaps() -> None:
    """Steps that ``--measure-overlap`` runs without overlap are longer, and not the subject of the picture."""
    seconds = (1.0, 2.0, 3.0, 9.0, 9.0, 9.0, 4.0)
    steps = [[Event(0, Interval(MODEL, 0, 0, 0.0, each))] for each in seconds]
    records = [replace(STEP, overlapped=each < 9) for each in seconds]
    assert typical_decode_step(steps, records) is steps[2]
    assert typical_decode_step(steps, [replace(STEP, is_decode=False)] * 7) is steps[6]


def test_places_of_lost_r_workers_are_not_idle_r_workers() -> None:
    """Two of three places have an R-worker, with 3 and 1 seconds: 1.5 times their mean, and not 2.25."""
    lost = replace(STEP, r_seconds=(3.0, 0.0, 1.0), pool=Pool(2), num_starts=1)
    idle = replace(lost, pool=Pool(3))
    assert [steady_figures([step], 0.0, None)["imbalance"] for step in (lost, idle)] == [1.5, 2.25]
