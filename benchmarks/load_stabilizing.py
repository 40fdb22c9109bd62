"""The load-stabilizing schedule against whole waves, live: python benchmarks/load_stabilizing.py

Equal requests with short prompts, several times as many as are in flight, run under ``request-level`` (all start
together, wave after wave) and ``sls``, A B A B on one engine. The S-worker computes on one core. The R-workers are
stand-ins (``--stand-ins``, 8), which take a set time per cached token and layer and use no core. Before each round that
time is set so that R time equals S time at the mean load: the same number of sequences, all at mean length, decode for
a few steps; the prompts' part of S time is added. Mark: steady tokens per second 1.10 times those of waves (the ideal
is 1.25).

With two mini-batches the S-worker waits for the whole way S + R of a mini-batch, so every disturbance of either shows
where R = S; with three the other two have S time to hide it. ``--mini-batches 2,3`` runs both; each is compared with
waves of its own. ``--plot`` draws each schedule's steps.

With ``--stand-ins 0`` an R-worker attends on another core, as fast as it is: tune ``--intermediate`` until the S:R
line says 1.0 within a tenth. On two cores S and R slow each other down, so that then little is gained.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from models import llama_folder
from stand_in import StandInBackend

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.measure.dataset import WorkItem
from fastdecode.measure.plots import plot_steps
from fastdecode.measure.throughput import run_throughput, warm_up
from fastdecode.measure.throughput_report import ThroughputRun, steady_figures
from fastdecode.metrics import StepRecord
from fastdecode.scheduler import SCHEDULES, Scheduler

PROMPT_LEN = 4
CALIBRATION_STEPS = 32
GAIN = 1.10


@dataclass(frozen=True)
class Figures:
    """Steady tokens per second, peak load; milliseconds of a steady step in its three states, and of the busiest
    R-worker; S time over R time of all steady steps."""

    steady: float
    seconds: float
    peak: int
    s: float
    wait: float
    host: float
    r: float
    s_to_r: float

    def __str__(self) -> str:
        return (
            f"{self.steady:7.1f} steady tokens/s, whole run {self.seconds:5.1f} s, peak {self.peak}; a step: "
            f"S {self.s:.2f} + wait {self.wait:.2f} + host {self.host:.2f} ms (R {self.r:.2f}), S:R {self.s_to_r:.3f}"
        )


class Bench:
    """One engine, whose scheduler is replaced for each run."""

    def __init__(self, args: argparse.Namespace, num_mini_batches: int) -> None:
        self.args = args
        folder = llama_folder(args.hidden, args.layers, vocab=512, group=1, intermediate=args.intermediate)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            kv_cache_dtype=args.kv_cache_dtype,
            max_num_seqs=args.in_flight,
            enable_prefix_caching=False,
            num_mini_batches=num_mini_batches,
            s_threads=1,
            r_threads=1,
            s_cores="0",
            r_cores="1",
        )
        self.stand_ins = StandInBackend(0.0, num_workers=args.stand_ins) if args.stand_ins else None
        self.engine = LLMEngine(config, self.stand_ins)

    @property
    def mean_load(self) -> int:
        """KV tokens attended per step, all places taken by sequences of every age."""
        return self.args.in_flight * (2 * PROMPT_LEN + self.args.output_len) // 2

    def balance(self) -> None:
        """Make the stand-ins as fast as the S-worker at the mean load: all sequences there, at mean length."""
        if self.stand_ins is None:
            return
        length = self.mean_load // self.args.in_flight - CALIBRATION_STEPS // 2
        items = [WorkItem([1] * length, CALIBRATION_STEPS) for _ in range(self.args.in_flight)]
        for _ in range(2 if self.stand_ins.seconds_per_token else 3):
            self._schedule_by("request-level")
            steps = run_throughput(self.engine, items).steps[4:]
            with_prompts = 1 + PROMPT_LEN / self.args.output_len
            s_seconds = with_prompts * statistics.mean(step.s_seconds for step in steps)
            self.stand_ins.seconds_per_token = (
                s_seconds / self.args.layers * self.args.stand_ins / statistics.mean(step.kv_load for step in steps)
            )

    def run(self, schedule: str) -> ThroughputRun:
        """All requests."""
        self._schedule_by(schedule)
        count = self.args.in_flight * self.args.waves
        items = [WorkItem([1 + i % 500] * PROMPT_LEN, self.args.output_len) for i in range(count)]
        warm_up(self.engine, items)
        self._schedule_by(schedule)
        return run_throughput(self.engine, items)

    def _schedule_by(self, schedule: str) -> None:
        """Nothing moves: stand-ins hold no cache."""
        limits = replace(self.engine.scheduler.limits, seconds_per_moved_token=math.inf)
        if self.stand_ins:
            limits = replace(limits, balanced_kv_tokens=self.mean_load // self.args.stand_ins)
        else:
            interval = max(1, self.args.output_len // 32)
            peak = self.mean_load + self.args.in_flight * interval // 2
            limits = replace(limits, kv_load_limit=peak, micro_batch_interval=interval)
        self.engine.replace_scheduler(Scheduler(SCHEDULES[schedule], limits))


def main() -> None:
    """Print every run, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-ins", type=int, default=8, metavar="N", help="(8); 0: attention on another core")
    parser.add_argument("--mini-batches", default="2", help="one number or more, such as 2,3 (2)")
    parser.add_argument("--in-flight", type=int, default=64, help="(64)")
    parser.add_argument("--output-len", type=int, default=80, help="(80)")
    parser.add_argument("--waves", type=int, default=5, help="requests per place in flight (5)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    parser.add_argument("--hidden", type=int, default=384, help="(384)")
    parser.add_argument("--layers", type=int, default=16, help="(16)")
    parser.add_argument("--intermediate", type=int, default=768, help="sets S time (768)")
    parser.add_argument("--kv-cache-dtype", default="float32", help="(float32)")
    parser.add_argument("--plot", metavar="PREFIX", help="write PREFIX-request-level.png and PREFIX-sls.png")
    args = parser.parse_args()
    for number in map(int, args.mini_batches.split(",")):
        print(f"{args.stand_ins} stand-ins, {number} mini-batches", flush=True)
        bench = Bench(args, number)
        try:
            _compare(list(_rounds(bench, args)))
        finally:
            bench.engine.close()


def _rounds(bench: Bench, args: argparse.Namespace) -> Iterator[tuple[Figures, Figures]]:
    for _ in range(args.rounds):
        bench.balance()
        found = []
        for schedule in ("request-level", "sls"):
            run = bench.run(schedule)
            found.append(_figures(run, args))
            print(f"{schedule:13s} {found[-1]}", flush=True)
            if args.plot:
                plot_steps(run.steps, run.kv_load_limit, f"{args.plot}-{schedule}.png")
        yield found[0], found[1]


def _figures(run: ThroughputRun, args: argparse.Namespace) -> Figures:
    steady = _steady(run.steps, args.output_len)
    states = [
        1e3 * statistics.mean(getattr(step, name) for step in steady)
        for name in ("s_seconds", "wait_seconds", "host_seconds")
    ]
    r = 1e3 * statistics.mean(max(step.r_seconds) for step in steady)
    peak = max(step.kv_load for step in run.steps)
    rate = steady_figures(run.steps, args.output_len, run.kv_load_limit)["tokens_per_second"]
    return Figures(float(rate or 0), run.elapsed_seconds, peak, *states, r, states[0] / r)


def _steady(steps: list[StepRecord], output_len: int) -> list[StepRecord]:
    """As ``steady_figures`` has them."""
    starts = [index for index, step in enumerate(steps) if step.num_starts]
    return steps[starts[0] + output_len : starts[-1] + 1]


def _compare(rounds: list[tuple[Figures, Figures]]) -> None:
    for name, text in (("steady", "steady tokens/s"), ("peak", "peak KV load"), ("seconds", "total seconds")):
        ratios = [getattr(sls, name) / getattr(waves, name) for waves, sls in rounds]
        middle = statistics.median(ratios)
        missed = name == "steady" and middle < GAIN
        print(
            f"{text}: sls over request-level {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            f"{' | MISSED' if missed else ''}"
        )
    s_to_r = [figures.s_to_r for each in rounds for figures in each]
    held = all(0.95 <= ratio <= 1.05 for ratio in s_to_r)
    print(f"S:R {min(s_to_r):.3f} to {max(s_to_r):.3f}{'' if held else ' | not R = S within a twentieth'}")


if __name__ == "__main__":
    main()
