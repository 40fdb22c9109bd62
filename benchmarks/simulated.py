"""One run of ``fastdecode simulate`` within this process: its flags in, its report out."""

from __future__ import annotations

import argparse
import math
from typing import Any

from fastdecode.cli.simulate import add_command, simulate, simulation_report
from fastdecode.cli.simulate_inputs import read_simulation


def simulated(flags: str) -> dict[str, Any]:
    """The report, as ``--output-json`` has it, of ``fastdecode simulate`` with ``flags``."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    inputs = read_simulation(parser.parse_args(["simulate", *flags.split()]))
    return simulation_report(simulate(inputs, inputs.rate if inputs.rate else math.inf), inputs)
