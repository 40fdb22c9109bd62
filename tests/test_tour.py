"""``docs/tour.md`` shows what ``examples/tour.py`` prints."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"-?\d+\.\d{3}\b")


@pytest.mark.slow
def test_the_tour_shows_what_its_example_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """The lines agree; numbers of three decimals may differ where another processor adds in another order."""
    runpy.run_path(str(ROOT / "examples" / "tour.py"), run_name="__main__")
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "tour.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    shown = "".join(block for block in blocks if "──" not in block).splitlines()
    printed = [line for line in capfd.readouterr().out.splitlines() if line]
    assert [NUMBER.sub("…", line) for line in shown] == [NUMBER.sub("…", line) for line in printed]
    for wanted, found in zip(shown, printed, strict=True):
        numbers = [[float(each) for each in NUMBER.findall(line)] for line in (wanted, found)]
        assert numbers[1] == pytest.approx(numbers[0], abs=5e-3)
