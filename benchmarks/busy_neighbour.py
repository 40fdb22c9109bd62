"""A decode step beside one busy process over the same step on quiet cores: python benchmarks/busy_neighbour.py

The neighbour is stopped and let run in turn (A B A B) on the last of the cores; attention is a stand-in that answers
at once. ``--keep-threads`` does not let the S-worker use fewer threads, for comparison.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import time

from models import decode, llama_folder, stand_in_engine

from fastdecode.engine import LLMEngine
from fastdecode.machine import usable_cores


def keep_busy(core: int) -> None:
    """Never leave ``core``."""
    os.sched_setaffinity(0, {core})
    while True:
        pass


def step_seconds(engine: LLMEngine, rows: int, steps: int) -> list[float]:
    """Wall seconds of the decode steps of one run."""
    return [step.wall_seconds for step in decode(engine, rows, steps).steps if step.is_decode][1:-1]


def main() -> None:
    """Print the quiet step, the step beside the neighbour, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=576, help="(576)")
    parser.add_argument("--layers", type=int, default=30, help="(30)")
    parser.add_argument("--rows", type=int, default=64, help="(64)")
    parser.add_argument("--dtype", default="bfloat16", help="(bfloat16)")
    parser.add_argument("--steps", type=int, default=40, help="decode steps per round (40)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--keep-threads", action="store_true", help="all threads, whatever a step takes")
    args = parser.parse_args()
    cores = usable_cores()
    engine = stand_in_engine(llama_folder(args.hidden, args.layers, group=3), args.rows, 1, len(cores), args.dtype)
    if args.keep_threads:
        engine._s_worker._pipeline.cores.stop = lambda: None  # type: ignore[method-assign]
    neighbour = multiprocessing.get_context("spawn").Process(target=keep_busy, args=(cores[-1],))
    neighbour.start()
    try:
        report(engine, args, neighbour.pid or 0)
    finally:
        neighbour.kill()
        engine.close()


def use_all_threads(engine: LLMEngine) -> None:
    """End the rest of those threads that waited for the neighbour, which would last some seconds into the quiet."""
    engine._s_worker._pipeline.cores.start_anew()


def report(engine: LLMEngine, args: argparse.Namespace, neighbour: int) -> None:
    """One line per round, and the medians."""
    time.sleep(1)
    step_seconds(engine, args.rows, args.steps)
    ratios = []
    for _ in range(args.rounds):
        os.kill(neighbour, signal.SIGSTOP)
        use_all_threads(engine)
        quiet = step_seconds(engine, args.rows, args.steps)
        os.kill(neighbour, signal.SIGCONT)
        busy = step_seconds(engine, args.rows, args.steps)
        ratios.append(statistics.mean(busy) / statistics.mean(quiet))
        print(
            f"quiet {statistics.mean(quiet) * 1e3:.1f} ms (median {statistics.median(quiet) * 1e3:.1f}), beside a busy "
            f"process {statistics.mean(busy) * 1e3:.1f} (median {statistics.median(busy) * 1e3:.1f}): {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"mean step beside a busy process over quiet: {statistics.median(ratios):.2f} ({min(ratios):.2f} to", end=" ")
    print(f"{max(ratios):.2f})")


if __name__ == "__main__":
    main()
