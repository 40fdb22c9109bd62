"""``python -m gpu_kit [--device cuda|cpu] [--quick] [--out DIR]`` runs each part in its own process, and reports."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_kit.machine import machine
from gpu_kit.report import Ended, read_rows, write

WHOLE_SECONDS = {False: 540.0, True: 340.0}
"""Limit of all parts together, by whether the run is quick."""


@dataclass(frozen=True)
class PartSpec:
    """A part: its module, and the seconds that it may take, in a quick run as well."""

    letter: str
    title: str
    module: str
    seconds: float
    quick_seconds: float


PARTS = (
    PartSpec("a", "Exactness: transformers' generate on the same device", "gpu_kit.exactness", 230, 120),
    PartSpec("b", "The S-part over bare products", "gpu_kit.s_part", 70, 60),
    PartSpec("c", "A layer's way there and back", "gpu_kit.transfers", 20, 30),
    PartSpec("d", "End to end, beside the device alone", "gpu_kit.end_to_end", 170, 90),
    PartSpec("e", "Packed checkpoints", "gpu_kit.packed", 50, 60),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; return 0 once the report is written."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description="Prove and measure FastDecode here, and write a report."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report (%(default)s)")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + WHOLE_SECONDS[args.quick]
    ended = []
    for spec in PARTS:
        limit = min(spec.quick_seconds if args.quick else spec.seconds, max(5.0, end - time.monotonic()))
        print(f"{spec.letter}. {spec.title} (at most {limit:.0f} s)", flush=True)
        ended.append(run_part(spec, args.device, args.quick, args.out, limit))
    write(args.out, machine(), args.device, args.quick, ended)
    print(f"{args.out / 'report.md'} is written: please attach this folder's files to an issue")
    return 0


def run_part(spec: PartSpec, device: str, quick: bool, out: Path, limit: float) -> Ended:
    """Run a part in a process group of its own; what it wrote is kept however it ends."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as own:
        rows = out.resolve() / f".rows-{spec.letter}.json"
        command = [sys.executable, "-m", spec.module, "--rows", str(rows), "--device", device]
        command += ["--quick"] if quick else []
        log = Path(own) / "stderr"
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stderr=errors, start_new_session=True)
            reason = wait(process, limit)
        if process.returncode and not reason:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = f"exit {process.returncode}: {lines[-1][:300] if lines else 'nothing was said'}"
        found = read_rows(rows)
        rows.unlink(missing_ok=True)
    if reason:
        print(f"  {reason}", flush=True)
    return Ended(spec.letter, spec.title, time.monotonic() - start, found, reason)


def wait(process: subprocess.Popen[bytes], limit: float) -> str:
    """Wait for a part; where it takes too long, end its whole group and return the reason."""
    reason = ""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        reason = f"stopped after its limit of {limit:.0f} s"
    for own in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, own)
        except ProcessLookupError:
            break
        time.sleep(0.3)
    process.wait()
    return reason


if __name__ == "__main__":
    sys.exit(main())
