"""The GPU kit: its report has a row or a reason for each part, and a CPU runs all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import PATIENCE_SECONDS

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


ALL_PARTS = """
import os, sys
from gpu_kit import __main__ as kit
kit.PARTS = tuple(kit.PartSpec(each, f"Part {each}", f"part_{each}", 4, 4) for each in "abcde")
kit.why_no_device = lambda device: os.environ.get("NO_DEVICE", "")
sys.exit(kit.main(["--device", "cpu", "--quick", *sys.argv[1:]]))
"""


def run_kit(tmp_path: Path, parts: dict[str, str], *arguments: str, **environment: str) -> tuple[int, str, Any]:
    """Run the kit with parts of this code, ``parts`` by letter; return its exit code, what it said, and the report."""
    for letter in "abcde":
        (tmp_path / f"part_{letter}.py").write_text(WRITES + ROW + textwrap.dedent(parts.get(letter, "")))
    out = tmp_path / "out"
    own = os.environ | {"PYTHONPATH": f"{SCRIPTS}:{tmp_path}", "PYTHONSAFEPATH": "1"} | environment
    command = [sys.executable, "-c", ALL_PARTS, *(arguments or ("--out", str(out)))]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    file = out / "report.json"
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text()) if file.exists() else None


def test_parts_that_fail_are_named_and_the_others_run(tmp_path: Path) -> None:
    """Errors, a crash for want of memory, a row that is not as it must be; the run ends with 1."""
    wrong = """at.write_text('[{"name": "n", "value": 0.5, "unit": "", "note": "", "failed": true}]')"""
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code, said, found = run_kit(tmp_path, {"b": "raise MemoryError('no room')", "c": killed, "d": wrong})
    assert code == 1 and "failed: b: not finished (exit 1: MemoryError: no room)" in said
    assert [each[:1] for each in found["failed"]] == ["b", "c", "d"] and "d: n (0.5)" in found["failed"]
    assert "killed by SIGKILL, which the kernel sends where memory is short" in found["failed"][1]
    assert len(found["parts"]["e"]["rows"]) == 1
    assert "**Failed:** b: " in (tmp_path / "out" / "report.md").read_text()


def test_all_parts_well_end_with_0(tmp_path: Path) -> None:
    code, _, found = run_kit(tmp_path, {})
    assert (code, found["failed"]) == (0, [])
    assert "All parts finished" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_run_that_is_asked_to_stop_leaves_its_report(number: signal.Signals, tmp_path: Path) -> None:
    """The part that runs is ended, and those to come are named."""
    stops = f"import os, time; os.kill(os.getppid(), {number.value}); time.sleep(30)"
    code, _, found = run_kit(tmp_path, {"b": stops})
    assert code == 128 + number
    assert f"stopped by {number.name}" in found["failed"][0] and len(found["parts"]["a"]["rows"]) == 1
    assert [f"not begun: stopped by {number.name}" in each for each in found["failed"]] == [False, True, True, True]


def test_a_run_that_is_killed_leaves_what_ended(tmp_path: Path) -> None:
    code, _, found = run_kit(tmp_path, {"c": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"})
    assert code == -signal.SIGKILL
    rows = [[row["name"] for row in part["rows"]] for part in found["parts"].values()]
    assert rows == [["first"], ["first"], *[["not finished"]] * 3]


def test_a_host_that_cannot_run_has_a_report_with_the_reason(tmp_path: Path) -> None:
    code, _, found = run_kit(tmp_path, {}, NO_DEVICE="torch cannot compute on cuda: no driver")
    assert code == 1 and all("not begun: torch cannot compute on cuda: no driver" in each for each in found["failed"])
    code, _, found = run_kit(tmp_path, {}, KIT_FAILED="run.sh: python3 needs torch 2.11 or newer and has none")
    assert code == 1 and len(found["failed"]) == 5 and "needs torch 2.11" in found["failed"][0]


def test_no_file_of_others_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, said, _ = run_kit(tmp_path, {}, "--out", str(tmp_path))
    assert code == 2 and "has other files: give a new or empty folder" in said
    assert (tmp_path / "mine.txt").exists() and not (tmp_path / "report.md").exists()


@pytest.mark.slow
def test_a_device_is_tried_first() -> None:
    """In a process of its own: the CPU computes, and a name that torch does not know has its reason."""
    assert kit.why_no_device("cpu") == ""
    assert kit.why_no_device("no-such").startswith("torch cannot compute on no-such: RuntimeError")


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
