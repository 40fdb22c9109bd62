"""``python -m gpu_kit [--device cuda|cpu] [--quick] [--out DIR]`` runs each part in its own process, then reports."""

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

from gpu_kit import report
from gpu_kit.machine import machine
from gpu_kit.report import Ended, failed, read_rows, write

WHOLE_SECONDS = {False: 540.0, True: 340.0}
"""Limit of all parts together, by whether the run is quick."""


@dataclass(frozen=True)
class PartSpec:
    """A part of the kit: its module, and its time limits in a full and in a quick run."""

    letter: str
    title: str
    module: str
    seconds: float
    quick_seconds: float


PARTS = (
    PartSpec("a", "Exactness: transformers' generate on the same device", "gpu_kit.exactness", 200, 120),
    PartSpec("b", "The S-part over bare products", "gpu_kit.s_part", 70, 60),
    PartSpec("c", "A layer's way there and back", "gpu_kit.transfers", 20, 30),
    PartSpec("d", "End to end, beside the device alone", "gpu_kit.end_to_end", 200, 110),
    PartSpec("e", "Packed checkpoints", "gpu_kit.packed", 50, 60),
)


class Stop:
    """Remembers a signal that asks this run to end. The current part is then ended, and the report is written."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
                signal.signal(number, self._remember)

    def _remember(self, number: int, _: object) -> None:
        self.number = number

    @property
    def reason(self) -> str:
        """The reason for not running further parts; "" until a signal arrives."""
        return f"stopped by {signal.Signals(self.number).name}" if self.number else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts. Return 0 if all results are right, 1 if some are not, 128 plus its number after a signal."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description="Prove and measure FastDecode here, and write a report.",
        epilog="It ends with 0 if all parts are as they must be, and 1 if some failed; report.md says which.",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report (%(default)s)")
    args = parser.parse_args(arguments)
    if why := report.why_not(args.out):
        parser.error(f"--out {args.out} {why}")
    stop = Stop()
    reason = os.environ.get("KIT_FAILED", "").strip() or why_no_device(args.device)
    ended = run_parts(args.device, args.quick, args.out, stop, reason)
    files = f"{args.out / 'report.md'} is written: please attach this folder's files to an issue"
    print("\n".join([*(f"failed: {each}" for each in failed(ended)), files]), flush=True)
    return 128 + stop.number if stop.number else int(bool(failed(ended)))


def run_parts(device: str, quick: bool, out: Path, stop: Stop, reason: str) -> list[Ended]:
    """Run the parts, or none if there is a ``reason`` against it. Write the report after each part."""
    here = machine()
    end = time.monotonic() + WHOLE_SECONDS[quick]
    ended: list[Ended] = []
    for number, spec in enumerate(PARTS):
        rest = [Ended(each.letter, each.title, 0.0, (), "not begun") for each in PARTS[number:]]
        write(out, here, device, quick, [*ended, *rest])
        if why_not := reason or stop.reason:
            ended.append(Ended(spec.letter, spec.title, 0.0, (), f"not begun: {why_not}"))
            continue
        limit = min(spec.quick_seconds if quick else spec.seconds, max(5.0, end - time.monotonic()))
        print(f"{spec.letter}. {spec.title} (at most {limit:.0f} s)", flush=True)
        ended.append(run_part(spec, device, quick, out, limit, stop))
    write(out, here, device, quick, ended)
    return ended


def why_no_device(device: str) -> str:
    """Return why torch cannot compute on ``device``, as found in a separate process; "" if it can."""
    code = f"import torch; torch.ones(8, device='{device}').sum().item()"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    except subprocess.TimeoutExpired:
        return f"torch did not compute on {device} within 120 s"
    lines = done.stderr.strip().splitlines() or [ending(done.returncode)]
    return f"torch cannot compute on {device}: {lines[-1][:300]}" if done.returncode else ""


def ending(code: int) -> str:
    """Return in words how a process ended, from its exit code."""
    if code >= 0:
        return f"exit {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (", which the kernel sends where memory is short" if name == "SIGKILL" else "")


def run_part(spec: PartSpec, device: str, quick: bool, out: Path, limit: float, stop: Stop | None = None) -> Ended:
    """Run a part in its own process group. The rows that it wrote are kept however it ends."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as own:
        rows = out.resolve() / f".rows-{spec.letter}.json"
        command = [sys.executable, "-m", spec.module, "--rows", str(rows), "--device", device]
        command += ["--quick"] if quick else []
        log = Path(own) / "stderr"
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stderr=errors, start_new_session=True)
            reason = wait(process, limit, stop)
        if process.returncode and not reason:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = f"{ending(process.returncode)}: {lines[-1][:300] if lines else 'nothing was said'}"
        found = read_rows(rows)
        rows.unlink(missing_ok=True)
    if reason:
        print(f"  {reason}", flush=True)
    return Ended(spec.letter, spec.title, time.monotonic() - start, found, reason)


def wait(process: subprocess.Popen[bytes], limit: float, stop: Stop | None) -> str:
    """Wait for a part. If it takes too long, or this run must stop, end its process group and return the reason."""
    reason, end = "", time.monotonic() + limit
    while process.poll() is None and not reason:
        reason = stop.reason if stop else ""
        if time.monotonic() > end:
            reason = f"stopped after its limit of {limit:.0f} s"
        time.sleep(0.05)
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
