"""``validate`` writes its measurements to disk before anything else can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastdecode.perfmodel.deployment import Deployment, Drift
from fastdecode.perfmodel.lab.cli.validate import error_line, run_grid
from fastdecode.perfmodel.lab.measure.offline_run import OfflineRun
from fastdecode.perfmodel.lab.measure.validation import Configuration, ValidatedRow

ROW = ValidatedRow(
    configuration=Configuration("in turn", Deployment(2, 2), "inproc", None, 16, 128, "float32", 4),
    predicted_step_seconds=1.1, measured_step_seconds=1.0, predicted_s_seconds=0.5, measured_s_seconds=0.5,
    predicted_r_seconds=0.5, measured_r_seconds=0.4, measured_host_seconds=0.1, drift=Drift(1.0, 1.0), moved=0.01,
    tries=1,
)  # fmt: skip


class Measuring:
    """Replaces a Validation: its offline run is the given one, or fails in the given way."""

    def __init__(self, found: OfflineRun | BaseException) -> None:
        self.found = found

    def offline(self) -> OfflineRun:
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found


def broken_off(trouble: type[BaseException]) -> Iterator[ValidatedRow]:
    """Yield one row, then raise ``trouble``."""
    yield ROW
    raise trouble


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("within_the_grid", [True, False])
def test_rows_outlive_what_is_broken_off(tmp_path: Path, trouble: type[BaseException], within_the_grid: bool) -> None:
    path = tmp_path / "rows.json"
    rows = broken_off(trouble) if within_the_grid else [ROW]
    with pytest.raises(trouble):
        run_grid(rows, Measuring(trouble()), str(path), None)  # type: ignore[arg-type]
    found = json.loads(path.read_text())
    assert [row["error"] for row in found["configurations"]] == [pytest.approx(0.1)] and found["offline"] is None


def test_an_offline_run_is_added_to_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    run = OfflineRun(2.0, 2.5, 10, True)
    assert run_grid([ROW], Measuring(run), str(path), str(tmp_path / "rows.svg")) == run  # type: ignore[arg-type]
    found = json.loads(path.read_text())
    assert len(found["configurations"]) == 1 and found["offline"] == vars(run)
    assert (tmp_path / "rows.svg").read_text().startswith("<?xml")


def test_unsteady_rows_are_counted() -> None:
    line = error_line([ROW, replace(ROW, moved=0.051), replace(ROW, predicted_step_seconds=0.5)])
    assert line.startswith("3 configurations: median error 10.0%, worst 50.0% (in turn, float32, 16 x 128)")
    assert line.endswith("in 1 the anchors moved by more than 5 % in every try")
