"""The GPU kit: its report has a row or a reason for each part, and a CPU runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from gpu_kit import __main__ as kit  # noqa: E402
from gpu_kit import install, report  # noqa: E402
from gpu_kit.__main__ import PartSpec, run_part  # noqa: E402

MACHINE: dict[str, Any] = {
    "date": "2026-11-27 02:00 UTC", "python": "3.12.1", "system": "Linux", "cpu": "a CPU", "cores": 2,
    "memory_gib": 8.0, "gpu": "", "packages": {"torch": "2.13.0"},
}  # fmt: skip

WRITES = "import pathlib, sys; at = pathlib.Path(sys.argv[sys.argv.index('--rows') + 1])\n"
ROW = """at.write_text('[{"name": "first", "value": 1.5, "unit": "x", "note": "a|b"}]')\n"""


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit: float = 20.0) -> report.Ended:
    """Run a part with this code, whose process writes a row first."""
    (tmp_path / "own_part.py").write_text(WRITES + ROW + textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return run_part(PartSpec("b", "A part", "own_part", 9, 9), "cpu", True, tmp_path, limit)


def test_a_part_that_ends_well_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = ended(tmp_path, monkeypatch, "")
    assert part.reason == "" and [row["name"] for row in part.whole] == ["first"]
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".json"] == []


def test_a_part_that_fails_has_its_rows_and_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = ended(tmp_path, monkeypatch, "raise ValueError('no such kernel')")
    assert part.reason == "exit 1: ValueError: no such kernel"
    assert [row["name"] for row in part.whole] == ["first", "not finished"]


def test_a_part_that_takes_too_long_is_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows written so far are in the report, and a child that the part started does not stay."""
    code = """
        import subprocess, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        at.with_name("child").write_text(str(child.pid))
        time.sleep(600)
    """
    part = ended(tmp_path, monkeypatch, code, limit=3.0)
    assert part.reason == "stopped after its limit of 3 s" and part.whole[0]["name"] == "first"
    pid = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_that_says_nothing_has_a_reason() -> None:
    assert report.Ended("c", "t", 1.0, ()).whole[0]["note"] == "it wrote no row"
    assert report.read_rows(Path("/no/such")) == []


def test_the_report_has_every_part_and_few_small_files(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"picture-{number}.svg").write_bytes(b"x" * (number + 1))
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate((16 << 20) + 1)
    rows = [{"name": "first", "value": None, "unit": "", "note": "a|b"}]
    parts = [report.Ended(spec.letter, spec.title, 1.0, rows) for spec in kit.PARTS]
    report.write(tmp_path, MACHINE, "cpu", True, parts)
    page, data = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert [*data["parts"]] == ["a", "b", "c", "d", "e"]
    assert all(f"## {part.letter}. {part.title}" in page for part in parts) and "| first | none | a/b |" in page
    assert "no figure here says anything of a GPU" in page
    assert len([*tmp_path.iterdir()]) == 8 and not (tmp_path / "large.txt").exists()


def test_a_host_without_torch_is_one_clear_line(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\necho \'{"torch": "2.6.0", "transformers": ""}\'\n')
    old.chmod(0o755)
    with pytest.raises(SystemExit, match=r"needs torch 2\.11 or newer and has 2\.6\.0"):
        install.check(str(old))


def test_wheels_of_this_python_are_taken(tmp_path: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    names = (f"greenlet-3.5-{tag}-{tag}-manylinux_2_28_x86_64.whl", "greenlet-3.5-cp39-cp39-manylinux_2_28_x86_64.whl",
             "pytest-9.0-py3-none-any.whl", "pyzmq-27.3.0-cp312-abi3-manylinux_2_28_x86_64.whl")  # fmt: skip
    for name in names:
        (tmp_path / name).touch()
    found = install.fitting(tmp_path)
    assert found["greenlet"].name == names[0] and "pytest" in found
    assert ("pyzmq" in found) == (sys.version_info >= (3, 12))


@pytest.mark.thorough
@pytest.mark.timeout(420)
def test_the_kit_runs_on_a_cpu(tmp_path: Path) -> None:
    """All parts of a quick run end, and those that need a GPU say so."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "gpu_kit", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=400)
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [*parts] == ["a", "b", "c", "d", "e"]
    for letter, part in parts.items():
        assert len([row for row in part["rows"] if row["value"] is not None]) > 1, (letter, part)
        assert not any(row["name"] == "not finished" for row in part["rows"]), (letter, part)
    exact = [row for row in parts["a"]["rows"] if row["note"] == "must be 1"]
    assert len(exact) > 4 and all(row["value"] == 1.0 for row in exact)
