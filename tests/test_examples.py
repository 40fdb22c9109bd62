"""The examples that are scripts do what they say, with the demo model (examples/tour.py: tests/test_tour.py)."""

from __future__ import annotations

import atexit
import contextlib
import re
import runpy
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that a script would end at its exit."""
    register = atexit.register
    with contextlib.ExitStack() as end:

        def at_exit(function: Callable[..., object]) -> object:
            process = getattr(function, "__self__", None)
            if not isinstance(process, subprocess.Popen):
                return register(function)
            end.callback(process.communicate)
            return end.callback(function)

        monkeypatch.setattr(atexit, "register", at_exit)
        yield


def printed_by(name: str, capfd: pytest.CaptureFixture[str]) -> str:
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        signal.alarm(0)  # the script's limit, where it fails
    return capfd.readouterr().out


@pytest.mark.usefixtures("ends_with_the_test")
def test_three_r_workers_and_a_kill(capfd: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"1 R-worker lost in \d+ steps; 6 of 6 texts", printed_by("three_r_workers.py", capfd))


@pytest.mark.usefixtures("ends_with_the_test")
def test_a_spot_host_that_has_notice_one_that_vanishes_and_a_new_one(capfd: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("spot_hosts.py", capfd)
    assert "1 R-worker left, 1 lost" in printed and "1 joined; 6 of 6 texts are the same" in printed


def test_shared_documents_are_computed_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Three questions for each of two documents: nearly a third of the tokens."""
    printed = printed_by("shared_documents.py", capfd)
    found = re.search(r"(\d+) tokens of prompts computed, (\d+) without", printed)
    assert found and int(found[1]) < 0.45 * int(found[2])
    assert "6 of 6 answers are the same" in printed


@pytest.mark.parametrize("path", [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/*.sh")], ids=lambda path: path.name)
def test_every_example_has_a_time_limit(path: Path) -> None:
    assert re.search(
        r"^ *signal\.alarm\(\d+\)$|^(exec )?timeout \w+ |^#SBATCH .*--time=", path.read_text(), re.MULTILINE
    )
