"""Measure what a journal costs while nothing fails: tokens/s and the time between tokens, with it and without.

    python benchmarks/journal_cost.py [--rounds 5] [--rows 64] [--tokens 384] [--window 16] [--places folder r-workers]

Each round runs every place of a journal once, with new R-worker processes. An engine decodes ``--rows`` sequences. Of
every four windows of steps, it keeps its journal in the first and the last. So a machine that gets slower, and steps in
which all rows need a new block, affect steps with and without a journal alike. The place ``neither`` keeps no journal
in any window: its ratios show what chance does.

The first steps of all, and the first step of each window, are not counted. "of steps": the time that steps waited for
the journal, as the engine counts it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fastdecode.api.config import EngineConfig
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.engine.engine import LLMEngine
from fastdecode.journal.journal import Journal

WARM_STEPS = 8
FASTDECODE = str(Path(sys.executable).with_name("fastdecode"))


class Run(NamedTuple):
    """Milliseconds of full steps with the journal and without.
    ``share``: fraction of the former's time that writes took.
    """

    with_it: list[float]
    without: list[float]
    share: float


@contextmanager
def r_worker(threads: int) -> Iterator[str]:
    """Start an R-worker in its own process; yield its address."""
    flags = ("--listen", "tcp://127.0.0.1:0", "--threads", str(threads), "--kv-cache-memory", "128MiB")
    started = subprocess.Popen([FASTDECODE, "r-worker", *flags], stdout=subprocess.PIPE, text=True)
    try:
        line = started.stdout.readline() if started.stdout else ""
        yield line.split("tcp://")[1].split()[0].rstrip(",;")
    finally:
        started.kill()
        started.wait()


def measure(place: str, args: argparse.Namespace, number: int) -> Run:
    """Run one engine whose journal is in ``place``; return the times of its steps."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        addresses = [stack.enter_context(r_worker(args.r_threads)) for _ in range(args.r_workers)]
        config = EngineConfig(
            r_workers=",".join(addresses),
            max_num_seqs=args.rows,
            device="cpu",
            seed=1,
            max_model_len=64 + args.tokens,
            session=f"cost-{number}",
            keep_session=5.0,
            journal=folder if place in ("folder", "neither") else place,
        )
        engine = LLMEngine(config)
        stack.callback(engine.close)
        return decode(engine, place, args)


def decode(engine: LLMEngine, place: str, args: argparse.Namespace) -> Run:
    """Decode all rows, with the journal in two of every four windows; return the times of full steps."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    for index in range(args.rows):
        engine.add_request(str(index), f"def function_{index}(x, y):", params)
    none = Journal()
    kept = none if place == "neither" else engine.journal
    run, waited, count, last = Run([], [], 0.0), 0.0, 0, 0.0
    while engine.has_unfinished_requests():
        is_kept = count // args.window % 4 in (0, 3)
        engine._requests.journal = kept if is_kept else none
        before = kept.write_seconds
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) == args.rows and count > WARM_STEPS and count % args.window:
            (run.with_it if is_kept else run.without).append(1e3 * (now - last))
            waited += 1e3 * (kept.write_seconds - before)
        count, last = count + 1, now
    return run._replace(share=waited / sum(run.with_it))


def report(place: str, runs: list[Run]) -> None:
    """Print the figures of all runs together, and the smallest and largest figure of a single run."""
    ways = [("with it", [run.with_it for run in runs]), ("without", [run.without for run in runs])]
    for name, found in ways:
        steps = [each for one in found for each in one]
        print(
            f"{place}, {name}: {len(steps)} steps, mean {statistics.mean(steps):.2f} ms, "
            f"median {statistics.median(steps):.2f}, P99 {p99(steps):.2f}"
        )
    shares = [run.share for run in runs]
    print(f"  of steps           {statistics.median(shares):.2%} ({min(shares):.2%}–{max(shares):.2%})")
    for name, of in (("tokens/s", statistics.mean), ("median tokens/s", statistics.median), ("P99", p99)):
        pairs = [(of(run.with_it), of(run.without)) for run in runs]
        pairs.append((of([*chain(*ways[0][1])]), of([*chain(*ways[1][1])])))
        *each, all_runs = [b / a if "tokens" in name else a / b for a, b in pairs]
        print(f"  with / without, {name:<16} {all_runs:.3f} ({min(each):.3f}–{max(each):.3f})", flush=True)


def p99(steps: list[float]) -> float:
    return sorted(steps)[int(0.99 * len(steps))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--r-workers", type=int, default=2)
    parser.add_argument("--r-threads", type=int, default=1)
    parser.add_argument("--places", nargs="+", default=["folder", "r-workers"])
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {place: [] for place in args.places}
    for number in range(args.rounds):
        for place in args.places:
            runs[place].append(measure(place, args, number))
    for place in args.places:
        report(place, runs[place])


if __name__ == "__main__":
    main()
