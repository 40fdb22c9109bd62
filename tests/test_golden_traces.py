"""The scheduler's decisions are the recorded ones: bytes of every plan and all tokens of seeded runs.

``python tests/test_golden_traces.py`` records them anew, for a change that is meant to decide otherwise; its commit
says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # The path is for the command above.

from helpers.examples import SEES_ALL, thinned
from helpers.golden import GoldenRun

RECORDED = Path(__file__).parent / "golden_traces.json"
NUM_RUNS, NUM_GROUPS = 2000, 8
STRIDE = 1 if SEES_ALL else 16
"""``make test-all`` repeats every run, and ``make test`` one in 64."""


@pytest.mark.parametrize("group", thinned(range(NUM_GROUPS), 4))
def test_decisions_are_those_recorded(group: int) -> None:
    """The error names the run that differs, and its events say what to look at."""
    recorded = json.loads(RECORDED.read_text())
    assert len(recorded) == NUM_RUNS
    for seed in range(group * STRIDE, NUM_RUNS, NUM_GROUPS * STRIDE):
        run = GoldenRun(seed)
        assert recorded[seed] is None or run.digest() == recorded[seed], (seed, run.scheduler.limits, run.events)


def test_a_run_repeats_and_another_differs() -> None:
    assert GoldenRun(3).digest() == GoldenRun(3).digest() != GoldenRun(4).digest()


def record(seed: int) -> str | None:
    """Return the run's digest, or None where the scheduler fails, which is a fault to mend."""
    try:
        return GoldenRun(seed).digest()
    except Exception as error:
        print(f"run {seed}: {error!r}", file=sys.stderr)
        return None


if __name__ == "__main__":
    RECORDED.write_text(json.dumps([record(seed) for seed in range(NUM_RUNS)], indent=0) + "\n")
