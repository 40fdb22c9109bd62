"""Compare the load-stabilizing schedule with whole waves, live: python benchmarks/load_stabilizing.py

Equal requests with short prompts, several times as many as can run at once, run in two engines of one process. One uses
``request-level`` (all requests start together, wave after wave), the other ``sls``. The engines take turns of a few
steps, A B A B to the end, so that disturbances of the machine affect both. The same steps of both are compared, from
the second wave to the last. The S-worker computes on one core. The R-workers are stand-ins (``--stand-ins``, 8), which
use no core and take a set time per cached token and layer. That time follows the S time of both engines' last steps, so
that R time equals S time at the mean load, and is the same for both. Goal: 1.10 times the steady tokens per second of
waves (the ideal is 1.25).

With two mini-batches the S-worker waits for both S and R of a mini-batch, so every disturbance shows if R = S. With
three mini-batches the other two hide it. ``--mini-batches 2,3`` runs both numbers; each ``sls`` run is compared with
waves of the same number. ``--plot`` draws each schedule's steps.

With ``--stand-ins 0`` a real R-worker attends on another core: tune ``--intermediate`` until the S:R line is within a
tenth of 1.0. On two cores S and R slow each other down, so that little is gained.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace

from models import llama_folder
from stand_in import StandInBackend

from fastdecode.api.config import EngineConfig
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.metrics import StepRecord
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.lab.measure.dataset import WorkItem
from fastdecode.perfmodel.lab.measure.plots import plot_steps
from fastdecode.perfmodel.lab.measure.throughput import warm_up
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

PROMPT_LEN = 4
TURN = 8
"""Steps of one engine before the other's turn."""

KEPT = 32
"""Last steps of each engine whose S time sets the stand-ins' speed."""

GAIN = 1.10


@dataclass(frozen=True)
class Figures:
    """Steady tokens per second; peak load; a mean step's milliseconds of S, wait and host; R-workers' milliseconds."""

    steady: float
    peak: int
    s: float
    wait: float
    host: float
    r: float

    def __str__(self) -> str:
        return (
            f"{self.steady:7.1f} tokens/s, peak {self.peak}; a step: S {self.s:.2f} + wait {self.wait:.2f} + "
            f"host {self.host:.2f} ms (R {self.r:.2f}), S:R {self.s / self.r:.3f}"
        )


class Arm:
    """The engine of one schedule, with all requests queued."""

    def __init__(self, schedule: str, folder: str, num_mini_batches: int, args: argparse.Namespace) -> None:
        self.schedule, self.args = schedule, args
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            kv_cache_dtype=args.kv_cache_dtype,
            kv_cache_memory="2GiB",
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
        self.steps: list[StepRecord] = []

    def begin(self) -> None:
        """Queue all requests."""
        warm_up(self.engine, [WorkItem([1] * PROMPT_LEN, 2)])
        self.engine.replace_scheduler(Scheduler(SCHEDULES[self.schedule], self._limits()))
        self.engine.on_step = self.steps.append
        length = self.args.output_len
        params = SamplingParams(temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False)
        for index in range(self.args.in_flight * self.args.waves):
            prompt = {"prompt_token_ids": [1 + index % 500] * PROMPT_LEN}
            self.engine.add_request(f"{self.schedule}-{index}", prompt, params)

    def turn(self) -> None:
        """Run this engine for a turn of TURN steps."""
        self.engine.world.clock.restart()
        for _ in range(TURN):
            self.engine.step()

    @property
    def full_steps(self) -> list[StepRecord]:
        """Return the last steps in which nearly the whole batch got tokens."""
        return [step for step in self.steps[-KEPT:] if step.num_output_tokens >= 0.9 * self.args.in_flight]

    def _limits(self) -> Limits:
        """Return limits under which no sequence moves, since stand-ins hold no cache."""
        limits = replace(self.engine.scheduler.limits, seconds_per_moved_token=math.inf)
        if self.stand_ins:
            return replace(limits, balanced_kv_tokens=mean_load(self.args) // self.args.stand_ins)
        interval = max(1, self.args.output_len // 32)
        peak = mean_load(self.args) + self.args.in_flight * interval // 2
        return replace(limits, kv_load_limit=peak, micro_batch_interval=interval)


def mean_load(args: argparse.Namespace) -> int:
    """Return the KV tokens attended per step when the batch is full of sequences of every age."""
    return args.in_flight * (2 * PROMPT_LEN + args.output_len) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stand-ins", type=int, default=8, metavar="N", help="number of stand-ins (8); 0: attention on another core"
    )
    parser.add_argument("--mini-batches", default="2", help="numbers of mini-batches, such as 2,3 (2)")
    parser.add_argument("--in-flight", type=int, default=64, help="sequences in flight (64)")
    parser.add_argument("--output-len", type=int, default=80, help="output tokens (80)")
    parser.add_argument("--waves", type=int, default=5, help="requests per place in flight (5)")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds (1)")
    parser.add_argument("--hidden", type=int, default=384, help="hidden size (384)")
    parser.add_argument("--layers", type=int, default=16, help="number of layers (16)")
    parser.add_argument("--intermediate", type=int, default=768, help="width of the MLPs, which sets S time (768)")
    parser.add_argument("--kv-cache-dtype", default="float32", help="dtype of the KV cache (float32)")
    parser.add_argument("--plot", metavar="PREFIX", help="write PREFIX-request-level.png and PREFIX-sls.png")
    args = parser.parse_args()
    folder = llama_folder(args.hidden, args.layers, vocab=512, group=1, intermediate=args.intermediate)
    for number in map(int, args.mini_batches.split(",")):
        print(f"{args.stand_ins} stand-ins, {number} mini-batches", flush=True)
        _compare([_round(folder, number, args) for _ in range(args.rounds)])


def _round(folder: str, num_mini_batches: int, args: argparse.Namespace) -> tuple[Figures, Figures]:
    with ExitStack() as stack:
        cores, arms = os.sched_getaffinity(0), []
        for schedule in ("request-level", "sls"):
            os.sched_setaffinity(0, cores)  # An engine binds this thread to one core; the next one needs another.
            arms.append(Arm(schedule, folder, num_mini_batches, args))
            stack.callback(arms[-1].engine.close)
        _set_speed(arms, 1e-6)
        for arm in arms:
            arm.begin()
        num_steps = args.output_len * args.waves
        while len(arms[0].steps) < num_steps:
            for arm in arms:
                arm.turn()
            full = [step for arm in arms for step in arm.full_steps]
            if full:
                s_seconds = statistics.mean(step.s_seconds for step in full)
                _set_speed(arms, s_seconds * max(1, args.stand_ins) / args.layers / mean_load(args))
        found = [_figures(arm.steps[args.output_len : num_steps]) for arm in arms]
        for arm, figures in zip(arms, found, strict=True):
            print(f"{arm.schedule:13s} {figures}", flush=True)
            if args.plot:
                plot_steps(arm.steps, arm.engine.scheduler.load_limit.tokens, f"{args.plot}-{arm.schedule}.png")
    return found[0], found[1]


def _set_speed(arms: list[Arm], seconds_per_token: float) -> None:
    for arm in arms:
        if arm.stand_ins:
            arm.stand_ins.seconds_per_token = seconds_per_token


def _figures(steps: list[StepRecord]) -> Figures:
    wall = sum(step.wall_seconds for step in steps)
    states = [
        1e3 * statistics.mean(getattr(step, name) for step in steps)
        for name in ("s_seconds", "wait_seconds", "host_seconds")
    ]
    r = 1e3 * statistics.mean(max(step.r_seconds) for step in steps)
    peak = max(step.kv_load for step in steps)
    return Figures(sum(step.num_output_tokens for step in steps) / wall, peak, *states, r)


def _compare(rounds: list[tuple[Figures, Figures]]) -> None:
    for name, text in (("steady", "steady tokens/s"), ("peak", "peak KV load")):
        ratios = [getattr(sls, name) / getattr(waves, name) for waves, sls in rounds]
        middle = statistics.median(ratios)
        missed = name == "steady" and middle < GAIN
        print(
            f"{text}: sls over request-level {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            f"{' | MISSED' if missed else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
