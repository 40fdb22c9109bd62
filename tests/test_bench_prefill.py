"""``fastdecode bench prefill`` and ``calibrate --prefill``, with workers of known speed and with real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import model_zoo
from helpers.hardware import profile

from fastdecode.api.config import EngineConfig
from fastdecode.cli.main import main
from fastdecode.core.remote_prefill import PrefillPart
from fastdecode.perfmodel.lab.cli.calibrate import prefill_lines, without_prefill_workers
from fastdecode.perfmodel.lab.measure.plots import plot_prefill
from fastdecode.perfmodel.lab.measure.prefill_bench import (
    ALONE,
    METHODS,
    PrefillBench,
    num_measurements,
    report,
    table_lines,
)
from fastdecode.perfmodel.lab.measure.prefill_calibrator import PrefillCalibration, calibrate_prefill
from fastdecode.perfmodel.lab.measure.prefill_calibrator import num_measurements as calibration_measurements
from fastdecode.perfmodel.lab.measure.prefill_runs import PromptRun, in_order
from fastdecode.perfmodel.partition import closed_form, even
from fastdecode.perfmodel.prefill_rates import before_share, measured_prefill_model, measured_speeds, slowdown
from fastdecode.perfmodel.prefill_times import (
    PrefillTimes,
    PromptAttentionTimes,
    chain_traffic_tokens,
    tsp_traffic_tokens,
)
from fastdecode.perfmodel.stages import MeasuredSPart

SHAPE = replace(profile().shape, num_layers=4)
TRUE_MODEL = PrefillTimes(
    SHAPE.num_layers,
    MeasuredSPart((1, 1 << 20), (1e-5, 1e-5 * (1 << 20)), (0.0, 0.0)),
    PromptAttentionTimes(1e-8, 256),
    SHAPE.appending_row_bytes,
    before_share=before_share(SHAPE),
    job_seconds=0.002,
)


class KnownWorkers:
    """Three workers that take exactly the model's times, and 1.25 times as long while others compute.

    The last one is half as fast.
    """

    num_workers = 3
    speeds = (1.0, 1.0, 0.5)

    def __init__(self) -> None:
        self.num_runs = 0

    def run(self, jobs: Sequence[Sequence[PrefillPart]], method: str = "kvr") -> list[PromptRun]:
        self.num_runs += 1
        return [self._run(parts, method, len(jobs)) for parts in jobs]

    def _run(self, parts: Sequence[PrefillPart], method: str, num_jobs: int) -> PromptRun:
        rows = [part.end - part.start for part in parts]
        slow = 1.25 if len(parts) > 1 or num_jobs > 1 else 1.0
        speeds = [self.speeds[part.worker] / slow for part in parts]
        tsp = method == "tsp"
        seconds = TRUE_MODEL.tsp_seconds(rows, speeds) if tsp else TRUE_MODEL.chain_seconds(rows, speeds)[-1]
        tokens = tsp_traffic_tokens(rows) if tsp else chain_traffic_tokens(rows)
        bytes_per_token = SHAPE.num_layers * SHAPE.appending_row_bytes
        return PromptRun(seconds, tokens * bytes_per_token, sum(rows) * bytes_per_token)


PLAN = PrefillCalibration((512, 1024, 4096), (1024, 4096), (1, 2), rounds=2)


def test_calibration_finds_rates_speeds_and_parts() -> None:
    runner, ticks = KnownWorkers(), []
    found = calibrate_prefill(replace(profile(), shape=SHAPE), runner, PLAN, lambda: ticks.append(1))
    assert len(ticks) == calibration_measurements(PLAN, runner.num_workers)
    for n in (700, 3000):
        assert measured_prefill_model(found).alone_seconds(n) == pytest.approx(TRUE_MODEL.alone_seconds(n), rel=0.01)
    assert measured_speeds(found) == pytest.approx((1.0, 1.0, 0.5), rel=0.1)
    assert slowdown(found, 2) == pytest.approx(1.25, rel=0.05)
    assert [entry.num_tokens for entry in found.partitions] == [1024, 4096]
    for entry in found.partitions:
        best, balanced_evenly = (
            TRUE_MODEL.chain_seconds(parts)[-1] for parts in (entry.parts, even(entry.num_tokens, 2))
        )
        assert best < 0.95 * balanced_evenly
    text = "\n".join(prefill_lines(found))
    assert "Best parts of 4096 tokens" in text and "2 at once" in text and "speeds: 1, 1, 0.5" in text
    assert runner.num_runs < 120


def test_the_other_workers_are_measured_without_prefill_workers() -> None:
    """R-workers are measured though prefill workers were named."""
    config = EngineConfig(prefill_workers="spawn:2", prefill_threads=1, prefill_cores="0")
    assert without_prefill_workers(config) == EngineConfig()


def test_rows_stand_beside_predictions_and_formulas(tmp_path: Path) -> None:
    """Methods take turns, and the predictions of known times are nearly exact."""
    runner, ticks = KnownWorkers(), []
    plan = replace(PLAN, table_lengths=())
    measured = calibrate_prefill(replace(profile(), shape=SHAPE), runner, plan)
    bench = PrefillBench(runner, measured, METHODS, repeats=2)
    lengths, counts = [1024, 2048, 4096], [1, 2]
    rows = list(bench.rows(lengths, counts, lambda: ticks.append(1)))
    assert len(ticks) == num_measurements(METHODS, lengths, counts, 2)
    assert [(row.num_workers, row.prefill_len, row.method) for row in rows] == [
        (count, n, method) for count in counts for n in lengths for method in ([ALONE] if count == 1 else METHODS)
    ]
    assert all(sum(row.parts) == row.prefill_len for row in rows)
    found = report(rows)
    assert found["traffic_equals_formula"] and found["prediction_error"]["median"] < 0.02
    by_method = {row["method"]: row for row in found["rows"] if row["prefill_len"] == 4096}
    assert by_method["kvr-s"]["ttft_seconds_p50"] <= by_method["kvr-e"]["ttft_seconds_p50"]
    inside = {row.method: row.ttft_seconds_p50 for row in rows if row.prefill_len == 2048}
    assert inside["kvr-p"] <= 1.03 * inside["kvr-s"]
    assert by_method["kvr-s"]["ttft_over_tsp"] < 1 and by_method["kvr-s"]["ttft_over_alone"] < 0.8
    assert by_method["tsp"]["sent_bytes"] == 2 * by_method["kvr-e"]["sent_bytes"] > 0
    lines = list(table_lines(rows))
    assert len(lines) == 1 + len(rows) and lines[1].split()[:3] == ["1", "1024", "alone"]
    plot_prefill(rows, str(tmp_path / "prefill.png"))
    assert (tmp_path / "prefill.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_bytes_are_said() -> None:
    class Forgetful(KnownWorkers):
        def run(self, jobs: Sequence[Sequence[PrefillPart]], method: str = "kvr") -> list[PromptRun]:
            return [replace(run, stored_bytes=run.stored_bytes - 1) for run in super().run(jobs, method)]

    runner = Forgetful()
    measured = calibrate_prefill(replace(profile(), shape=SHAPE), runner, replace(PLAN, table_lengths=()))
    rows = list(PrefillBench(runner, measured, ["kvr-e"], 1).rows([512], [2]))
    assert not report(rows)["traffic_equals_formula"]


def test_interpolated_parts_come_from_other_lengths_or_the_closed_form() -> None:
    runner = KnownWorkers()
    measured = calibrate_prefill(replace(profile(), shape=SHAPE), runner, replace(PLAN, table_lengths=()))
    (row,) = PrefillBench(runner, measured, ["kvr-p"], 1).rows([1024], [2])
    assert row.parts == closed_form(measured_prefill_model(measured, 2), 1024, 2)
    with_table = calibrate_prefill(measured, runner, replace(PLAN, table_lengths=(512, 2048)))
    (row,) = PrefillBench(runner, with_table, ["kvr-p"], 1).rows([1024], [2])
    low, high = (entry.fractions[0] for entry in with_table.partitions)
    assert row.parts[0] / 1024 == pytest.approx(low + (high - low) / 3, abs=1e-3)


def test_parts_in_order() -> None:
    assert in_order((5, 0, 3), 1) == (PrefillPart(1, 0, 5), PrefillPart(3, 5, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-lens", "1024,x"], "prefill_lens must be whole numbers of at least 32"),
        (["--prefill-lens", "16"], "prefill_lens must be whole numbers of at least 32"),
        (["--workers", "0"], "workers must be whole numbers of at least 1"),
        (["--workers", "65"], "at most 64"),
        (["--methods", "kvr-e,ring"], "methods must be among kvr-e, kvr-s, kvr-p, tsp, not 'ring'"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--prefill-lens", "64", "--max-model-len", "64"], "do not fit max_model_len 64"),
        (["--workers", "3", "--prefill-workers", "spawn:2"], "prefill_workers has 2"),
    ],
)
def test_wrong_usage_is_one_clear_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", *arguments]) == 2
    assert message in capsys.readouterr().err


TINY = [
    "--device",
    "cpu",
    "--skip-tokenizer-init",
    "--kv-cache-memory",
    "16MiB",
    "--s-threads",
    "1",
    "--r-threads",
    "1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny Llama and return its folder."""
    return str(model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama")))


@pytest.mark.thorough
@pytest.mark.slow
def test_real_workers_are_measured(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every method runs on two processes; bytes follow the formula, and a table, a file and a picture are written."""
    path, picture = tmp_path / "prefill.json", tmp_path / "prefill.png"
    given = ["--model", folder, *TINY, "--prefill-lens", "48,96", "--repeats", "1", "--plot", str(picture)]
    assert main(["bench", "prefill", *given, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["traffic_equals_formula"] is True
    assert [(row["num_workers"], row["prefill_len"], row["method"]) for row in found["rows"]] == [
        *((1, n, ALONE) for n in (48, 96)), *((2, n, method) for n in (48, 96) for method in METHODS)
    ]  # fmt: skip
    assert min(row["ttft_seconds_p50"] for row in found["rows"]) > 0
    assert "traffic equals the formula" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
