"""``fastdecode simulate``: runs the engine's own scheduler, with step times from the performance model."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from fastdecode.api.config import EngineConfig
from fastdecode.cli.flags import SCHEDULE, add_common_flags, add_flags, add_placing_flags
from fastdecode.cli.output import check_output_files, progress_bar, write_json
from fastdecode.core.errors import ConfigError
from fastdecode.core.metrics import StepRecord
from fastdecode.perfmodel.lab.cli.bounds import check_simulated_time
from fastdecode.perfmodel.lab.cli.machine_flags import add_machine_flags, add_number_flags, add_pipeline_flags
from fastdecode.perfmodel.lab.cli.simulate_events import add_event_flags, compared, event_report
from fastdecode.perfmodel.lab.cli.simulate_inputs import SimulationInputs, read_simulation
from fastdecode.perfmodel.lab.cli.simulate_report import Simulation, json_number, simulation_lines, simulation_report
from fastdecode.perfmodel.lab.cli.variants.prefill_workers import add_prefill_flags
from fastdecode.perfmodel.lab.cli.variants.speculative_decoding import add_speculation_flags
from fastdecode.perfmodel.lab.cli.workload_inputs import DATASETS
from fastdecode.perfmodel.lab.measure.dataset import ARRIVALS, LENGTHS, WorkloadSpec
from fastdecode.perfmodel.lab.simulate import Simulator, Slo, find_capacity


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="the live scheduler against the performance model",
        description="Runs the engine's own scheduler in simulated time: what a workload would do on a machine that "
        "need not be at hand. docs/planning.md says what the model knows and what it leaves out.",
    )
    _add_workload_group(parser.add_argument_group("workload"))
    group = parser.add_argument_group("model and machine, by name")
    add_machine_flags(group)
    group.add_argument(
        "--num-r-workers", type=int, metavar="N", help="number of R-workers; 0: the GPU alone (as many as plan says)"
    )
    group.add_argument(
        "--r-worker-speeds", metavar="LIST",
        help="speed of each R-worker, relative to their mean, such as 1,2,1,2 (equal)",
    )  # fmt: skip
    group.add_argument(
        "--seconds-per-moved-token", type=float, metavar="SECONDS",
        help="time to move one cached token to another R-worker (by the model's bytes; without a "
            "model nothing moves)",
    )  # fmt: skip
    add_number_flags(parser.add_argument_group("or as measured"))
    add_prefill_flags(parser.add_argument_group("prefill workers"), automatic=False)
    add_speculation_flags(parser.add_argument_group("speculative decoding"))
    group = parser.add_argument_group("engine")
    add_flags(group, EngineConfig, SCHEDULE)
    add_placing_flags(group, "auto: what takes an R-worker longer to read than S time, or does not fit one")
    add_pipeline_flags(group, automatic=True)
    group.add_argument(
        "--max-model-len", type=int, metavar="TOKENS",
        help="most tokens of prompt and output together (the workload's longest)",
    )  # fmt: skip
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False,
        help="reuse the KV cache of random prompts, which alone have tokens (off)",
    )  # fmt: skip
    add_event_flags(parser.add_argument_group("workers that come and go"))
    _add_search_group(parser.add_argument_group("capacity search"))
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", metavar="FILE", help="file to write every figure to")
    group.add_argument("--plot-steps", metavar="PNG", help="file for a picture: KV load and seconds of every step")
    add_common_flags(parser)
    parser.set_defaults(run=run, num_prompts=None, request_rate=None)


def _add_search_group(group: Any) -> None:
    group.add_argument(
        "--slo-tbt-p99", type=float, metavar="SECONDS",
        help="find the largest request rate whose P99 time between tokens meets this limit",
    )  # fmt: skip
    group.add_argument(
        "--slo-delay-p50", type=float, metavar="SECONDS",
        help="with --slo-tbt-p99: limit of the median time from arrival to start (2)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Simulate at the given rate, or at the highest within the SLO; after Ctrl-C, print the finished part."""
    check_output_files(args.output_json, plots=(args.plot_steps,))
    slo = _slo(args)
    inputs = read_simulation(args)
    # About how many simulations a search for the capacity runs
    runs_of_a_search = 12
    runs = runs_of_a_search if slo else 2 if inputs.events else 1
    check_simulated_time(
        inputs.workload.prompt_lens.tolist(), inputs.workload.output_lens, inputs.limits.max_num_seqs,
        inputs.limits.max_num_batched_tokens, len(inputs.limits.num_blocks), runs,
    )  # fmt: skip
    print(f"{inputs.title}: {len(inputs.workload)} requests, {inputs.schedule}", flush=True)
    for assumption in inputs.assumptions:
        print(f"  {assumption}", flush=True)
    capacity = search_capacity(inputs, slo) if slo else None
    if slo and capacity is not None:
        print(_capacity_line(capacity, slo))
    rate = capacity or inputs.rate
    simulation = simulate(inputs, rate)
    report = simulation_report(simulation, inputs)
    interrupted = simulation.interrupted
    if report["events"] and not interrupted:
        undisturbed = simulate(replace(inputs, events=None), rate)
        interrupted = undisturbed.interrupted
        if not interrupted:
            report["events"] = compared(report["events"], report, simulation_report(undisturbed, inputs))
    known = {} if capacity is None else {"requests_per_second": json_number(capacity)}
    report["capacity"] = {**vars(slo), **known} if slo else None
    report["config"] = {name: value for name, value in vars(args).items() if name not in ("run", "from_file")}
    report["config"]["request_rate"] = json_number(rate)
    for line in simulation_lines(report):
        print(line)
    write_json(report, args.output_json)
    if args.plot_steps and simulation.steps:
        from fastdecode.perfmodel.lab.measure.plots import plot_steps

        plot_steps(simulation.steps, simulation.kv_load_limit, args.plot_steps)
        print(f"KV load and seconds of every step: {args.plot_steps}")
    if interrupted:
        raise interrupted
    return 0


def search_capacity(inputs: SimulationInputs, slo: Slo) -> float:
    """Return the most requests per second that meet ``slo``; 0 if no rate does, inf if there are too few requests."""

    def meets(rate: float) -> bool:
        requests = inputs.workload.at(rate)
        simulator = inputs.simulator()
        # Steps between checks whether the tried rate already exceeds the SLO
        look_every_steps = 64
        simulator.run(
            requests, lambda each: each.num_steps % look_every_steps == 0 and slo.is_lost(requests, each.now_seconds)
        )
        bar.update()
        return slo.is_met(requests)

    with progress_bar(None, "rate") as bar:
        offline = inputs.simulator()
        offline.run(inputs.workload.at(math.inf))
        return find_capacity(meets, len(inputs.workload) / offline.now_seconds)


def simulate(inputs: SimulationInputs, rate: float) -> Simulation:
    """Return the simulation of the workload at ``rate``, with every step."""
    requests = inputs.workload.at(rate)
    steps: list[StepRecord] = []
    simulator = inputs.simulator(steps.append)
    start = time.perf_counter()
    interrupted: KeyboardInterrupt | None = None
    try:
        with progress_bar(len(requests), "req") as bar:
            simulator.run(requests, partial(_shown, bar))
    except KeyboardInterrupt as stop:
        interrupted = stop
    scheduler = simulator.scheduler
    return Simulation(
        requests, steps, simulator.now_seconds, time.perf_counter() - start, scheduler.statistics,
        scheduler.load_limit.tokens, interrupted, simulator.prefill, simulator.changes.doubled, event_report(simulator),
    )  # fmt: skip


def _shown(bar: tqdm, simulator: Simulator) -> bool:
    """Update the progress bar. Return False, so that the simulator continues."""
    bar.update(simulator.num_finished - bar.n)
    return False


def _slo(args: argparse.Namespace) -> Slo | None:
    if args.slo_tbt_p99 is None:
        if args.slo_delay_p50 is not None:
            raise ConfigError("slo_delay_p50 is one of two limits of a capacity search: give --slo-tbt-p99 as well")
        return None
    return Slo(args.slo_tbt_p99) if args.slo_delay_p50 is None else Slo(args.slo_tbt_p99, args.slo_delay_p50)


def _capacity_line(rate: float, slo: Slo) -> str:
    kept = f"P99 time between tokens {slo.tbt_p99_seconds:g} s, median scheduling delay {slo.delay_p50_seconds:g} s"
    if rate == 0:
        return f"Capacity: none; no rate keeps to {kept}. At the rate asked for:"
    if math.isinf(rate):
        return f"Capacity: not found; all requests at once keep to {kept}, so there are too few for a queue to grow."
    return f"Capacity: {rate:.3g} requests/s within {kept}. At that rate:"


def _add_workload_group(group: Any) -> None:
    group.add_argument("--dataset-name", default="random", choices=DATASETS, help="source of the requests (random)")
    group.add_argument(
        "--dataset-path", metavar="FILE",
        help="trace file: JSONL with timestamp (seconds), input_length and output_length (tokens) per "
            "line",
    )  # fmt: skip
    add_flags(
        group, WorkloadSpec, (*LENGTHS, *ARRIVALS), num_prompts={"unset": "64; sarathi-…: 512; trace: all"},
        request_rate={"unset": "a trace's own pace, else inf: all at once"},
    )  # fmt: skip
