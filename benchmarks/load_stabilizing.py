"""The load-stabilizing schedule against whole waves: python benchmarks/load_stabilizing.py

Equal requests with short prompts, several times as many as are in flight, S-worker on one core and R-worker on
another (FastDecode, section 4.2 and its figure of step latencies). The same requests run under ``fcfs`` (all start
together, wave after wave) and ``sls`` (a micro-batch every F = S/32 steps, limit B(S+F)/2 and the prompts), A B A B.
Tune ``--intermediate`` until the S:R line says 1.0 within a tenth. ``--plot`` draws each schedule's steps.

With ``--stand-ins 8`` the R-workers only take time, as much per cached token as makes R time equal S time at the mean
load (S time is measured first, beside stand-ins, over whole waves), and use no core: what two cores cannot show.
Waves are then ``request-level``. The S:R line says where that is not within a tenth of 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass, replace

from models import llama_folder
from stand_in import StandInBackend

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.measure.dataset import WorkItem
from fastdecode.measure.plots import plot_steps
from fastdecode.measure.throughput import run_throughput, warm_up
from fastdecode.measure.throughput_report import ThroughputRun
from fastdecode.metrics import StepRecord

PROMPT_LEN = 16


@dataclass(frozen=True)
class Figures:
    """``steady``: output tokens per second from full occupancy to the last start; of all steps in waves."""

    seconds: float
    steady: float
    peak: int
    s_to_r: float


def main() -> None:
    """Print both schedules' figures and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=64, help="(64)")
    parser.add_argument("--interval", type=int, default=31, help="F, steps between micro-batches; S is 32 F (31)")
    parser.add_argument("--waves", type=int, default=5, help="requests per place in flight (5)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    parser.add_argument("--hidden", type=int, default=512, help="(512)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--intermediate", type=int, default=2048, help="sets S time (2048)")
    parser.add_argument("--kv-cache-dtype", default="float32", help="(float32)")
    parser.add_argument("--stand-ins", type=int, default=0, metavar="N", help="R-workers that only take time (none)")
    parser.add_argument("--plot", metavar="PREFIX", help="write PREFIX-fcfs.png and PREFIX-sls.png")
    args = parser.parse_args()
    folder = llama_folder(args.hidden, args.layers, vocab=512, group=1, intermediate=args.intermediate)
    waves = "request-level" if args.stand_ins else "fcfs"
    found: dict[str, list[Figures]] = {waves: [], "sls": []}
    seconds_per_token = _balanced_seconds_per_token(folder, args) if args.stand_ins else 0.0
    for _ in range(args.rounds):
        for schedule, figures in found.items():
            run = _run(schedule, folder, args, seconds_per_token)
            figures.append(_figures(schedule, run, args.in_flight))
            print(f"{schedule:5s} {figures[-1]}", flush=True)
            if args.plot:
                plot_steps(run.steps, run.kv_load_limit, f"{args.plot}-{schedule}.png")
    _compare(found, waves)


def _balanced_seconds_per_token(folder: str, args: argparse.Namespace) -> float:
    """Of one stand-in and one layer, so that R time is S time over whole waves, and so at the mean load.

    S time is not what it is without R-workers: it holds the prompts, and a core that has slept is slower. So it is
    measured beside the stand-ins, which are then made as fast as that, twice.
    """
    seconds_per_token = 1e-3 / args.layers * args.stand_ins / _mean_load(args)
    calibration = argparse.Namespace(**{**vars(args), "waves": 1})
    for _ in range(3):
        run = _run("request-level", folder, calibration, seconds_per_token)
        ratio = _figures("request-level", run, args.in_flight).s_to_r
        seconds_per_token *= ratio
        print(f"calibration: S:R {ratio:.2f}", flush=True)
    return seconds_per_token


def _mean_load(args: argparse.Namespace) -> float:
    """KV tokens attended per step, all places taken by sequences of every age."""
    return args.in_flight * (PROMPT_LEN + (32 * args.interval + 1) / 2)


def _run(schedule: str, folder: str, args: argparse.Namespace, seconds_per_token: float) -> ThroughputRun:
    engine = _engine(schedule, folder, args, seconds_per_token)
    requests = range(args.in_flight * args.waves)
    items = [WorkItem([1 + i % 500] * PROMPT_LEN, 32 * args.interval + 1) for i in requests]
    try:
        warm_up(engine, items)
        return run_throughput(engine, items)
    finally:
        engine.close()


def _engine(schedule: str, folder: str, args: argparse.Namespace, seconds_per_token: float) -> LLMEngine:
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=args.in_flight,
        schedule=schedule,
        enable_prefix_caching=False,
        kv_load_limit=None if args.stand_ins else args.in_flight * (2 * PROMPT_LEN + 33 * args.interval) // 2,
        micro_batch_interval=None if args.stand_ins else args.interval,
        num_mini_batches=2,
        s_threads=1,
        r_threads=1,
        s_cores="0",
        r_cores="1",
    )
    if not args.stand_ins:
        return LLMEngine(config)
    stand_ins = StandInBackend(0.0, num_workers=args.stand_ins, seconds_per_token=seconds_per_token)
    engine = LLMEngine(config, stand_ins)
    balanced = int(_mean_load(args) / args.stand_ins)
    limits = replace(engine.scheduler.limits, balanced_kv_tokens=balanced, seconds_per_moved_token=math.inf)
    engine.replace_scheduler(engine.scheduler.with_limits(limits))  # nothing moves: stand-ins hold no cache
    return engine


def _figures(schedule: str, run: ThroughputRun, in_flight: int) -> Figures:
    steps = run.steps
    if schedule == "sls":
        full = next((i for i, step in enumerate(steps) if step.num_output_tokens >= 0.97 * in_flight), 0)
        last_start = max(i for i, step in enumerate(steps) if not step.is_decode)
        steps = steps[full : last_start + 1]
    seconds, tokens = _sum(steps, "wall_seconds"), _sum(steps, "num_output_tokens")
    r_seconds = sum(max(step.r_seconds) for step in steps)
    peak = max(step.kv_load for step in run.steps)
    return Figures(run.elapsed_seconds, tokens / seconds, peak, _sum(steps, "s_seconds") / r_seconds)


def _sum(steps: list[StepRecord], name: str) -> float:
    return sum(getattr(step, name) for step in steps)


def _compare(found: dict[str, list[Figures]], waves: str) -> None:
    def median(schedule: str, name: str) -> float:
        return statistics.median(getattr(figures, name) for figures in found[schedule])

    ratios = [median(schedule, "s_to_r") for schedule in (waves, "sls")]
    holds = all(0.9 <= ratio <= 1.1 for ratio in ratios)
    print(f"S:R on average: {waves} {ratios[0]:.2f}, sls {ratios[1]:.2f}{'' if holds else ' | NOT R = S'}")
    for name, text in (("peak", "peak KV load"), ("steady", "steady tokens/s"), ("seconds", "total seconds")):
        ratios = [getattr(b, name) / getattr(a, name) for a, b in zip(found[waves], found["sls"], strict=True)]
        print(
            f"{text}: {waves} {median(waves, name):.1f}, sls {median('sls', name):.1f}, "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
