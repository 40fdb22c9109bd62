"""``fastdecode collect-env``: facts of this machine for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from typing import Any

from fastdecode import __version__
from fastdecode.cli.flags import add_common_flags
from fastdecode.core.machine import available_memory_bytes, cpu_name, total_memory_bytes, usable_cores
from fastdecode.engine.compose.backends import tuning


def add_command(commands: Any) -> None:
    parser = commands.add_parser("collect-env", help="print versions and what this process may use of the machine")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts of this machine, one per line."""
    for name, value in facts().items():
        print(f"{name + ':':<22} {value}")
    return 0


def chosen_isa() -> str:
    """Return the CPU instruction set that R-workers use on this machine.

    Raise ConfigError if FASTDECODE_ISA names one that this machine lacks.
    """
    return tuning().isa


def machine_facts() -> dict[str, Any]:
    """Return facts of this machine as plain data. This measures the memory read bandwidth of all cores."""
    from fastdecode import _rworker

    cores = usable_cores()
    # Bytes read to measure the memory bandwidth: far more than the last-level cache holds
    read_peak_bytes = 512 * 2**20
    return {
        "cpu": cpu_name(),
        "isa": chosen_isa(),
        "cores": len(cores),
        "memory_bytes": total_memory_bytes(),
        "read_peak_gb_per_s": _rworker.read_peak(len(cores), read_peak_bytes, 5),
        "platform": platform.platform(),
    }


def facts() -> dict[str, str]:
    """Return the facts of a bug report (versions, CPU, GPU) as text by name, in the order to print them."""
    from fastdecode import _rworker

    chosen = tuning()
    found = {
        "fastdecode": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": f"{len(usable_cores())} usable: {usable_cores()}",
        "memory": f"{available_memory_bytes() / 2**30:.1f} GiB free of {total_memory_bytes() / 2**30:.1f} GiB",
        "instruction sets": ", ".join(_rworker.supported_isas()),
        "R-workers here use": f"{chosen.isa}, read-ahead {chosen.read_ahead}",
        "gpu": _first_line("nvidia-smi", "-L") or "none found",
        "mpirun": _first_line("mpirun", "--version") or "none found",
    }
    packages = ("torch", "transformers", "tokenizers", "numpy", "greenlet", "pyzmq", "mpi4py", "ray")
    return found | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _first_line(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (result.stdout.strip().splitlines() or [""])[0]
