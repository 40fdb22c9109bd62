"""What a network costs a step, and what three mini-batches hide of it: python benchmarks/namespaces.py (as root)

An S-worker and two R-workers in three network namespaces of this machine, joined by links that ``tc`` shapes. The
S-worker has one thread on the first core, the R-workers one each on the last. The same sequences are decoded with
mini-batches one after another, which shows what S, R and transfer take by themselves, and with two and three that
overlap, in turns A B C A B C. With two mini-batches a step should take max(S, R, transfer, half of all), with three a
third of all. In float32, for the S-part to be quick beside its payload on any CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cluster_throughput import SPARE_TOKENS, decode_steps, fill_contexts, settings_for
from links import enter_namespace, linked, shape

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.metrics import StepRecord

PORT = 5580
NUM_R_WORKERS = 2
MODES = (1, 2, 3)
"""Mini-batches that overlap; 1: three, one after another."""


@dataclass(frozen=True)
class Figures:
    """Medians of a turn's steps, in seconds; ``r`` and ``transfer`` of the R-worker that has most."""

    step: float
    s: float
    r: float
    transfer: float

    @property
    def largest(self) -> float:
        """What a step takes at least."""
        return max(self.s, self.r, self.transfer)

    @staticmethod
    def of(steps: list[StepRecord]) -> Figures:
        """The medians."""
        return Figures(
            statistics.median(step.wall_seconds for step in steps),
            statistics.median(step.s_seconds for step in steps),
            statistics.median(max(step.r_seconds) for step in steps),
            statistics.median(max(step.transfer_seconds) for step in steps),
        )


def main() -> None:
    """Print a row per rate and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", default="1,10", metavar="LIST", help="rates of each link, Gbit/s (1,10)")
    parser.add_argument("--context", type=int, default=64, help="tokens cached for each sequence (64)")
    parser.add_argument("--sequences", type=int, default=768, help="(768)")
    parser.add_argument("--hidden", type=int, default=256, help="heads of 64, as many for keys as queries (256)")
    parser.add_argument("--intermediate", type=int, default=64, help="sets S time (64)")
    parser.add_argument("--security", metavar="LEVEL", help="as `fastdecode r-worker --security` (CURVE)")
    parser.add_argument("--layers", type=int, default=12, help="(12)")
    parser.add_argument("--steps", type=int, default=4, help="decode steps of a turn (4)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (7)")
    args = parser.parse_args()
    rates = [float(rate) for rate in args.gbit.split(",")]
    if len(rates) * len(MODES) * args.steps * (args.rounds + 1) > SPARE_TOKENS - 32:
        parser.error(f"contexts may grow by {SPARE_TOKENS} tokens: fewer rates, steps or rounds")
    try:
        enter_namespace()
        _measure(args, rates)
    except RuntimeError as error:
        sys.exit(f"namespaces: {error}")


def _measure(args: argparse.Namespace, rates: list[float]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    settings = settings_for(args, cores[0], "float32")
    memory = settings.pop("kv_cache_memory")
    with contextlib.ExitStack() as cleanup:
        key = _key_file(Path(cleanup.enter_context(tempfile.TemporaryDirectory())))
        flags = ["--key-file", str(key), "--kv-cache-memory", str(memory), "--cores", str(cores[-1]), "--threads", "1"]
        flags += ["--security", args.security] if args.security else []
        workers = [cleanup.enter_context(_r_worker(index, flags)) for index in range(NUM_R_WORKERS)]
        settings |= {"r_workers": ",".join(address for _, address in workers), "key_file": str(key)}
        settings |= {"security": args.security} if args.security else {}
        engine = LLMEngine(EngineConfig(**settings, num_mini_batches=3))
        cleanup.callback(engine.close)
        fill_contexts(engine, args)
        print("| Gbit/s | overlapping | step ms (least to most) | S | R | transfer | step / largest |")
        print("|---|---|---|---|---|---|---|")
        for rate in rates:
            for index, (process, _) in enumerate(workers):
                shape(index, process, rate)
            _print_rows(rate, _turns(engine, args))


def _turns(engine: LLMEngine, args: argparse.Namespace) -> dict[int, list[Figures]]:
    found: dict[int, list[Figures]] = {mode: [] for mode in MODES}
    for turn in range(args.rounds + 1):
        for mode, figures in found.items():
            engine.overlap = mode > 1
            limits = engine.scheduler.limits
            engine.scheduler.limits = replace(limits, num_mini_batches=mode if mode > 1 else 3)
            steps = decode_steps(engine, args.steps)
            if turn:  # the first is to warm up
                figures.append(Figures.of(steps))
    return found


def _print_rows(rate: float, found: dict[int, list[Figures]]) -> None:
    """S, R and transfer of every row are its own; what they are compared with is what they take one after another."""
    for mode, figures in found.items():
        steps = [each.step for each in figures]
        parts = (statistics.median(getattr(each, name) for each in figures) * 1e3 for name in ("s", "r", "transfer"))
        ratios = [each.step / alone.largest for each, alone in zip(figures, found[1], strict=True)]
        print(
            f"| {rate:g} | {mode if mode > 1 else 'none'} | {statistics.median(steps) * 1e3:.1f} "
            f"({min(steps) * 1e3:.1f}–{max(steps) * 1e3:.1f}) | {' | '.join(f'{part:.1f}' for part in parts)} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |",
            flush=True,
        )
    hidden = [two.step / three.step for two, three in zip(found[2], found[3], strict=True)]
    print(f"{rate:g} Gbit/s: two mini-batches take {statistics.median(hidden):.3f} times as long as three "
          f"({min(hidden):.3f} to {max(hidden):.3f})", flush=True)  # fmt: skip


@contextlib.contextmanager
def _r_worker(index: int, flags: list[str]) -> Iterator[tuple]:
    """The process and its "host:port"."""
    program = str(Path(sys.executable).with_name("fastdecode"))
    command = [program, "r-worker", "--listen", f"tcp://10.213.{index}.2:{PORT}", *flags]
    with linked(index, command) as (process, address):
        line = process.stdout.readline() if process.stdout else ""
        if "tcp://" not in line:
            raise RuntimeError("an R-worker did not start: see above")
        print(line.strip(), flush=True)
        yield process, f"{address}:{PORT}"


def _key_file(folder: Path) -> Path:
    key = folder / "key"
    key.touch(0o600)
    key.write_text(os.urandom(32).hex())
    return key


if __name__ == "__main__":
    main()
