"""Ten rounds of ``make chaos``, of the kinds that take a second or two each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.processes import TESTS

FIRST_SEED = 100


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_ten_rounds_are_clean() -> None:
    """Random settings, kills, drains and joins; a round that is unclean is printed with its seed."""
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "chaos", "--small", "--rounds", "10", "--seed", str(FIRST_SEED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
