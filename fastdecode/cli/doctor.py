"""``fastdecode doctor``: what would keep R-workers from working here, each finding with its cure."""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.addresses import parse_r_workers
from fastdecode.cli.doctor_checks import Finding, check_kernels, check_machine, check_mpi, check_port
from fastdecode.cli.doctor_links import check_links
from fastdecode.cli.flags import add_common_flags, add_security_flag
from fastdecode.errors import ConfigError

MARKS = {"ok": "ok     ", "note": "note   ", "broken": "BROKEN "}


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, its MPI and the R-workers that are given; every finding comes with its cure",
        description="Exits 1 when something is broken. Under mpirun it looks at the job as well.",
    )
    parser.add_argument("--r-workers", metavar="HOST:PORT,…", help="listening R-workers to measure")
    parser.add_argument("--key-file", metavar="FILE", help="secret shared with them")
    add_security_flag(parser)
    parser.add_argument("--port", type=int, default=5580, help="that an R-worker would listen on here (5580)")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if one is broken."""
    if args.r_workers and parse_r_workers(args.r_workers).kind != "tcp":
        raise ConfigError(f"r_workers: doctor measures R-workers at host:port, not {args.r_workers!r}")
    if not 1 <= args.port <= 65535:
        raise ConfigError(f"port must be 1 to 65535, not {args.port}")
    broken = False
    for finding in _findings(args):
        broken = broken or finding.level == "broken"
        print(f"{MARKS[finding.level]}{finding.what}", flush=True)
        if finding.cure:
            print(f"{'':7}  → {finding.cure}", flush=True)
    return int(broken)


def _findings(args: argparse.Namespace) -> list[Finding]:
    links = check_links(args.r_workers, args.key_file, args.security) if args.r_workers else []
    return [*check_machine(), *check_kernels(), *check_mpi(), check_port(args.port), *links]
