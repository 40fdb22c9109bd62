"""Engines killed with -9 at random moments of a load, one after another: see ``chaos.killed``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("kind", "journal"),
    [*((kind, "folder") for kind in (0, 1, 2, 5, 6, 7)), (0, "r-workers"), (1, "r-workers")],
    ids=[
        *("the engine", "and an R-worker", "and all R-workers", "a hybrid", "and prefill", "chats"),
        *("without a disk", "and an R-worker without a disk"),
    ],
)
def test_nothing_is_lost_or_doubled(kind: int, journal: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "chaos.killed", "--kills", "20", "--kinds", str(kind), "--journal", journal]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
