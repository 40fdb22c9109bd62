"""What ``plan --validate`` has measured is on the disk before anything else can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastdecode.bench.offline_run import OfflineRun
from fastdecode.bench.validate import Configuration, ValidatedRow
from fastdecode.bench.validate_table import error_line
from fastdecode.cli.plan_validate import add_offline
from fastdecode.perfmodel.deployment import Deployment, Drift

ROW = ValidatedRow(
    configuration=Configuration("in turn", Deployment(2, 2), "inproc", None, 16, 128, "float32", 4),
    predicted_step_seconds=1.1, measured_step_seconds=1.0, predicted_s_seconds=0.5, measured_s_seconds=0.5,
    predicted_r_seconds=0.5, measured_r_seconds=0.4, measured_host_seconds=0.1, drift=Drift(1.0, 1.0), moved=0.01,
    tries=1,
)  # fmt: skip


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, MemoryError])
def test_rows_outlive_an_offline_run_that_is_broken_off(tmp_path: Path, trouble: type[BaseException]) -> None:
    path = tmp_path / "rows.json"

    def broken_off() -> OfflineRun:
        raise trouble

    with pytest.raises(trouble):
        add_offline([ROW], broken_off, str(path))
    found = json.loads(path.read_text())
    assert [row["error"] for row in found["configurations"]] == [pytest.approx(0.1)] and found["offline"] is None


def test_an_offline_run_is_added_to_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    run = OfflineRun(2.0, 2.5, 10, True)
    assert add_offline([ROW], lambda: run, str(path)) == run == add_offline([ROW], lambda: run, None)
    found = json.loads(path.read_text())
    assert len(found["configurations"]) == 1 and found["offline"] == vars(run)


def test_unsteady_rows_are_counted() -> None:
    line = error_line([ROW, replace(ROW, moved=0.051), replace(ROW, predicted_step_seconds=0.5)])
    assert line.startswith("3 configurations: median error 10.0%, worst 50.0% (in turn, float32, 16 x 128)")
    assert line.endswith("in 1 the anchors moved by more than 5 % in every try")
