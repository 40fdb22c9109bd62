"""Measure what a journal costs while nothing fails: tokens/s and the time between tokens, with it and without.

    python benchmarks/journal_cost.py [--rounds 5] [--rows 64] [--tokens 384] [--window 1] [--places folder r-workers]

Each round runs every place once, with R-worker processes of its own. An engine decodes ``--rows`` sequences. It keeps
its journal in the first and the last of every four windows of steps. So drift, and the steps in which all rows need a
new block, slow steps with and without a journal alike. Step times vary by 40 % within seconds on shared cores, so long
windows show chance: the place ``neither``, which keeps no journal in any window, shows how much.

The first steps of all are not counted, nor is the first step of each window of several. "own time": the time of the
journal's code in a step, of which the mean and the 99th percentile show its direct effect.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
    """Milliseconds of full steps with the journal and without. ``own``: the journal's milliseconds in the first."""

    with_it: list[float]
    without: list[float]
    own: list[float]


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
    own = OwnTime(kept)
    run, count, last = Run([], [], []), 0, 0.0
    while engine.has_unfinished_requests():
        is_kept = count // args.window % 4 in (0, 3)
        engine._requests.journal = kept if is_kept else none
        own.seconds = 0.0
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) == args.rows and count > WARM_STEPS and (args.window == 1 or count % args.window):
            (run.with_it if is_kept else run.without).append(1e3 * (now - last))
            if is_kept:
                run.own.append(1e3 * own.seconds)
        count, last = count + 1, now
    return run


class OwnTime:
    """Counts the ``seconds`` that a step spends in the code of ``journal``."""

    def __init__(self, journal: Journal) -> None:
        self.seconds = 0.0
        for name in ("grew", "settle"):
            setattr(journal, name, self._timed(getattr(journal, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*values: object) -> None:
            start = time.perf_counter()
            call(*values)
            self.seconds += time.perf_counter() - start

        return timed


def report(place: str, runs: list[Run]) -> None:
    """Print the figures of all runs together, and the least and the largest figure of one run."""
    ways = [("with it", [run.with_it for run in runs]), ("without", [run.without for run in runs])]
    for name, found in ways:
        steps = [each for one in found for each in one]
        print(
            f"{place}, {name}: {len(steps)} steps, mean {statistics.mean(steps):.2f} ms, "
            f"median {statistics.median(steps):.2f}, P99 {p99(steps):.2f}"
        )
    for name, of in (("tokens/s", statistics.mean), ("median tokens/s", statistics.median), ("P99", p99)):
        pairs = [(of(run.with_it), of(run.without)) for run in runs]
        pairs.append((of([*chain(*ways[0][1])]), of([*chain(*ways[1][1])])))
        *each, all_runs = [b / a if "tokens" in name else a / b for a, b in pairs]
        print(f"  with / without, {name:<16} {all_runs:.3f} ({min(each):.3f}–{max(each):.3f})", flush=True)
    steps, own = ([*chain(*(getattr(run, name) for run in runs))] for name in ("with_it", "own"))
    rest = [a - b for a, b in zip(steps, own, strict=True)]
    print(f"  own time: mean {statistics.mean(own):.3f} ms, most {max(own):.2f}; with / without it: tokens/s "
          f"{sum(rest) / sum(steps):.4f}, P99 {p99(steps) / p99(rest):.4f}", flush=True)  # fmt: skip


def p99(steps: list[float]) -> float:
    return sorted(steps)[int(0.99 * len(steps))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--window", type=int, default=1)
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
