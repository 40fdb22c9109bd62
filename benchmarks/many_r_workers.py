"""Check in simulation that many R-workers are as evenly loaded as one: python benchmarks/many_r_workers.py

Pools with the same total R speed are compared: 1, 8, 32 and 128 equal R-workers, and 8 with speeds 1:2:3:4 twice. Every
schedule runs with equal lengths (16 + 1,008 tokens) and mixed ones (128 + 512, each up to 80 % more or less), with
1,024 sequences at a time, at which R time equals S time. All R-workers have the same memory. Together they hold twice
the cache of all sequences at mean full length, or at the longest length for schedules that reserve it. Moving a cached
token takes a millisecond (7B in 16 bits at 0.5 GB/s).

Goals: steady tokens per second within 3 % of one R-worker's; the busiest R-worker's time at most 1.05 times the mean's
(1.10 with 128); no preemption. For ``sls`` with equal lengths: steady mean load at least 0.97 of its limit, peak at
most 0.56 of request-level's, steady tokens per second at least 1.18 times request-level's (1.10 with the presets of the
paper's machine, each schedule with its best number of mini-batches). For ``sls`` with mixed lengths: 0.95 of the limit,
and 1.02 times the best other schedule. Rows that miss a goal say so; the exit status is then 1. ``--lengths`` and
``--fleets`` run a part of all; only schedules that were run are compared. ``unknown``: mixed lengths of which the
scheduler knows only that outputs have at most twice the mean.

``--kv-replicas 2``: two copies and twice the memory, without the schedules that cannot have copies (``--lengths
mixed,unknown --fleets 8,32 --schedules sls``). Goals: in every steady step the busiest R-worker's time is at most 1.02
times the mean's; no preemption. ``--slow``: one R-worker is half as fast for a minute. Goal: the mean step of that
minute takes at most 1.1 times as long as if the load were divided by the speeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from fastdecode.perfmodel.lab.cli.simulate import add_command, simulate
from fastdecode.perfmodel.lab.cli.simulate_inputs import SimulationInputs, read_simulation
from fastdecode.perfmodel.lab.cli.simulate_report import simulation_report
from fastdecode.perfmodel.lab.simulate import SplitMachine, StepCost
from fastdecode.perfmodel.load import Load
from fastdecode.scheduler import SCHEDULES

FLEETS = ("1", "8", "32", "128", "1:2:3:4 twice")
LENGTHS = {
    "equal": (1.55e-8, "--random-input-len 16 --random-output-len 1008", (1024, 1024), 8),
    "mixed": (1.77e-8, "--random-input-len 128 --random-output-len 512 --random-range-ratio 0.8", (640, 1152), 12),
}
LENGTHS["unknown"] = LENGTHS["mixed"]
"""R seconds per token and layer of all R-workers together; the workload, its mean and its longest full length, and its
generations."""

SEATS = 1024
KV_BYTES_PER_TOKEN = 32 * 2 * 4096 * 2
"""Bytes per token of Llama 7B in 16 bits."""

PRESET = "--model llama-7b --gpu a10 --cpu epyc-7452 --num-r-workers 8 --num-prompts 8192 --max-num-seqs 1024"

MOST_TOKENS = 1024
"""The max_tokens of outputs whose length is unknown to the scheduler."""

SLOW_FROM_SECONDS, SLOW_SECONDS, SLOW_SPEED = 300.0, 60.0, 0.5
"""When one R-worker becomes slow, for how long, and how fast it is then; from simulated start."""

Key = tuple[str, str, str]


def simulation_inputs(flags: str) -> SimulationInputs:
    """Return the inputs that ``fastdecode simulate`` reads from ``flags``."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    return read_simulation(parser.parse_args(["simulate", *flags.split()]))


def report_of(inputs: SimulationInputs) -> dict[str, Any]:
    return simulation_report(simulate(inputs, inputs.rate if inputs.rate else math.inf), inputs)


def simulated(flags: str) -> dict[str, Any]:
    """Return the report of ``fastdecode simulate`` with ``flags``."""
    return report_of(simulation_inputs(flags))


def flags(lengths: str, fleet: str, schedule: str, kv_replicas: int = 1) -> str:
    """Return the flags of ``fastdecode simulate`` for one run."""
    seconds, workload, full_lens, generations = LENGTHS[lengths]
    workers = 8 if ":" in fleet else int(fleet)
    speeds = " --r-worker-speeds 1,2,3,4,1,2,3,4" if ":" in fleet else ""
    full_len = full_lens[SCHEDULES[schedule].reserves_longest]
    memory = 2 * kv_replicas * SEATS * full_len * KV_BYTES_PER_TOKEN // workers
    return (
        f"--s-part-seconds 4e-3 --num-layers 32 --r-part-seconds-per-token {seconds * workers} "
        f"--model llama-7b --kv-cache-memory {memory} --seconds-per-moved-token 1e-3 "
        f"--num-r-workers {workers} --max-num-seqs {SEATS} --schedule {schedule} --kv-replicas {kv_replicas} "
        f"{workload} --num-prompts {SEATS * generations}{speeds}"
    )


class SlowingMachine:
    """A machine whose first R-worker is slow for a while.
    ``over_ideal``: for each step of that time, its seconds divided by those with a load divided by the speeds.
    """

    kv_bytes_per_token = KV_BYTES_PER_TOKEN

    def __init__(self, machine: SplitMachine, num_workers: int) -> None:
        speeds = np.ones(num_workers)
        speeds[0] = SLOW_SPEED
        model, self._speeds = machine.model, speeds
        r_part = model.r_part.times(1 / float(speeds.mean()))
        self._usual = machine
        self._slow = replace(machine, model=replace(model, r_part=r_part), speeds=tuple(speeds.tolist()))
        self.seconds_per_moved_token = machine.seconds_per_moved_token
        self._now_seconds, self.over_ideal = 0.0, list[float]()

    def cost(self, load: Load, kv_loads: Sequence[float]) -> StepCost:
        is_slow = 0 <= self._now_seconds - SLOW_FROM_SECONDS < SLOW_SECONDS
        machine = self._slow if is_slow else self._usual
        cost = machine.cost(load, kv_loads)
        if is_slow:
            divided = (sum(kv_loads) * self._speeds / self._speeds.sum()).tolist()
            ideal = machine.cost(load, divided)
            self.over_ideal.append(cost.wall_seconds / ideal.wall_seconds)
        self._now_seconds += cost.wall_seconds
        return cost


def measure(key: Key, kv_replicas: int = 1, slow: bool = False) -> dict[str, Any]:
    """Return the steady figures of one run, its peak load, its preemptions, and the busiest R-worker's time."""
    inputs = simulation_inputs(flags(*key, kv_replicas))
    if key[0] == "unknown":
        inputs = replace(inputs, workload=replace(inputs.workload, max_tokens=MOST_TOKENS))
    slowing = None
    if slow:
        machine = inputs.machine
        if not isinstance(machine, SplitMachine):
            raise TypeError("only R-workers can be slow")
        slowing = SlowingMachine(machine, len(inputs.limits.num_blocks))
        inputs = replace(inputs, machine=slowing)
    report = report_of(inputs)
    figures = {**report["steady"], "peak": report["kv_load"]["peak_tokens"], "preemptions": report["preemptions"]}
    return figures | {"over_ideal": slowing.over_ideal if slowing else []}


def misses(key: Key, figures: dict[str, Any], alone: dict[str, Any] | None, kv_replicas: int) -> Iterator[str]:
    """Yield which goals the run ``key`` misses. ``alone``: the same run with a single R-worker."""
    if alone and figures["tokens_per_second"] < 0.97 * alone["tokens_per_second"]:
        yield "below 0.97 of one R-worker's"
    over_ideal = figures["over_ideal"]
    if over_ideal and np.mean(over_ideal) > 1.1:
        yield "slow"
    one_copy = figures["imbalance"] > (1.10 if key[1] == "128" else 1.05)
    if not over_ideal and (figures["imbalance_max"] > 1.02 if kv_replicas > 1 else one_copy):
        yield "uneven"
    if figures["preemptions"]:
        yield f"{figures['preemptions']} preemptions"


def against_others(lengths: str, found: dict[Key, dict[str, Any]]) -> Iterator[str]:
    """Yield lines that compare ``sls`` with its limit and with other schedules, for one and for eight R-workers."""
    marks = {"equal": (0.97, 1.18), "mixed": (0.95, 1.02)}.get(lengths)
    for fleet in ("1", "8"):
        if marks is None or any((lengths, fleet, name) not in found for name in SCHEDULES):
            continue
        own = found[lengths, fleet, "sls"]
        waves = found[lengths, fleet, "request-level"]
        others = [found[lengths, fleet, name]["tokens_per_second"] for name in SCHEDULES if name != "sls"]
        rival = waves["tokens_per_second"] if lengths == "equal" else max(others)
        load = own["mean_kv_tokens"] / own["limit_kv_tokens"]
        gain = own["tokens_per_second"] / rival
        peak = own["peak"] / waves["peak"]
        missed = load < marks[0] or gain < marks[1] or (lengths == "equal" and peak > 0.56)
        yield (
            f"sls, {lengths}, {fleet} R-worker(s): load {load:.3f} of its limit, peak {peak:.3f} of waves', "
            f"{gain:.3f} times {'their speed' if lengths == 'equal' else 'the best other'}"
            f"{' | MISSED' if missed else ''}"
        )


def presets() -> Iterator[str]:
    """Yield lines for the paper's machine, each schedule with its best number of mini-batches.
    With two mini-batches a step near R = S waits for the round trip to R-workers. With three the S-worker reads the
    weights once more.
    """
    machine = f"{PRESET} --random-input-len 16 --random-output-len 1008"
    found = {}
    for schedule, number in product(("sls", "request-level"), (2, 3)):
        report = simulated(f"{machine} --num-mini-batches {number} --schedule {schedule}")
        found[schedule, number] = report["steady"]["tokens_per_second"]
        yield f"paper's machine, {schedule}, {number} mini-batches: {found[schedule, number]:.0f} steady tokens/s"
    own, waves = (max(found[schedule, number] for number in (2, 3)) for schedule in ("sls", "request-level"))
    yield f"paper's machine, each at its best: {own / waves:.3f} times{'' if own >= 1.10 * waves else ' | MISSED'}"


def _over_ideal(ratios: list[float]) -> str:
    """Return mean, median, 99th percentile and maximum of the ratios, and how many exceed 1.1."""
    if not ratios:
        return ""
    p50, p99 = np.percentile(ratios, (50, 99))
    above = sum(ratio > 1.1 for ratio in ratios)
    return f" | {np.mean(ratios):.3f}, {p50:.3f}, {p99:.3f}, {max(ratios):.3f}, {above} of {len(ratios)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="processes that simulate (2)")
    parser.add_argument("--lengths", default="equal,mixed", help="workloads, of equal, mixed and unknown (equal,mixed)")
    parser.add_argument("--fleets", default=",".join(FLEETS), help=f"({','.join(FLEETS)})")
    parser.add_argument(
        "--presets", action=argparse.BooleanOptionalAction, default=True, help="also run the paper's machine (on)"
    )
    parser.add_argument("--schedules", help="schedules to run (all that fit the workload)")
    parser.add_argument("--kv-replicas", type=int, default=1, choices=(1, 2), help="copies of each sequence (1)")
    parser.add_argument("--slow", action="store_true", help="make one R-worker half as fast for a minute (off)")
    args = parser.parse_args()
    lengths, fleets = args.lengths.split(","), args.fleets.split(",")
    able = [name for name, each in SCHEDULES.items() if args.kv_replicas == 1 or not each.reserves_longest]
    schedules = args.schedules.split(",") if args.schedules else able
    keys = [(each, fleet, schedule) for each in lengths for schedule in schedules for fleet in fleets]
    found: dict[Key, dict[str, Any]] = {}
    missed = False
    print(
        "lengths | schedule | R-workers | steady tokens/s | busiest over mean: mean, max | mean load | peak load | "
        "preemptions" + (" | over ideal while slow: mean, median, P99, max, steps above 1.1" if args.slow else "")
    )
    with ProcessPoolExecutor(args.processes) as pool:
        run = partial(measure, kv_replicas=args.kv_replicas, slow=args.slow)
        for key, figures in zip(keys, pool.map(run, keys), strict=True):
            found[key] = figures
            wrong = ", ".join(misses(key, figures, found.get((key[0], "1", key[2])), args.kv_replicas))
            missed |= bool(wrong)
            print(
                f"{key[0]} | {key[2]} | {key[1]} | {figures['tokens_per_second']:.0f} | {figures['imbalance']:.3f}, "
                f"{figures['imbalance_max']:.3f} | "
                f"{figures['mean_kv_tokens']:.0f} | {figures['peak']} | {figures['preemptions']}"
                f"{_over_ideal(figures['over_ideal'])}"
                f"{' | MISSED: ' + wrong if wrong else ''}",
                flush=True,
            )
    lines = [line for each in lengths for line in against_others(each, found)]
    for line in (*lines, *(presets() if args.presets else ())):
        missed |= "MISSED" in line
        print(line, flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
