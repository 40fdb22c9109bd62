"""One run of ``fastdecode simulate`` within this process: its flags in, its report out."""

from __future__ import annotations

import argparse
import math
from typing import Any

from fastdecode.cli.simulate import add_command, simulate, simulation_report
from fastdecode.cli.simulate_inputs import SimulationInputs, read_simulation


def simulation_inputs(flags: str) -> SimulationInputs:
    """What ``fastdecode simulate`` makes of ``flags``."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    return read_simulation(parser.parse_args(["simulate", *flags.split()]))


def report_of(inputs: SimulationInputs) -> dict[str, Any]:
    """The report, as ``--output-json`` has it."""
    return simulation_report(simulate(inputs, inputs.rate if inputs.rate else math.inf), inputs)


def simulated(flags: str) -> dict[str, Any]:
    """The report of ``fastdecode simulate`` with ``flags``."""
    return report_of(simulation_inputs(flags))
