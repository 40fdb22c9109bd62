"""The report of a simulation: the outcome of its requests, in figures and words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from fastdecode.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fastdecode.core.metrics import StepRecord
from fastdecode.perfmodel.lab.cli.plan_answer import service_figures
from fastdecode.perfmodel.lab.cli.simulate_events import event_lines
from fastdecode.perfmodel.lab.cli.simulate_inputs import SimulationInputs
from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun, summary_lines, throughput_report
from fastdecode.perfmodel.lab.simulate import PrefillFleet, SimulatedRequest
from fastdecode.scheduler import SchedulerStatistics


@dataclass(frozen=True)
class Simulation:
    """The outcome of a run. ``elapsed_seconds``: simulated. ``wall_seconds``: the real time of the simulation.

    ``doubled``: second copies made between steps. ``events``: worker events and their cost; None without events.
    """

    requests: list[SimulatedRequest]
    steps: list[StepRecord]
    elapsed_seconds: float
    wall_seconds: float
    statistics: SchedulerStatistics
    kv_load_limit: int | None
    interrupted: KeyboardInterrupt | None = None
    prefill: PrefillFleet | None = None
    doubled: int = 0
    events: dict[str, Any] | None = None


def simulation_report(simulation: Simulation, inputs: SimulationInputs) -> dict[str, Any]:
    """Return the report: the keys of ``bench throughput`` except ``config``, and keys that only simulations have."""
    finished = [_output(request) for request in simulation.requests if request.finished]
    run = ThroughputRun(
        simulation.elapsed_seconds, finished, simulation.steps, simulation.statistics, simulation.kv_load_limit
    )
    started = [r.scheduling_delay_seconds for r in simulation.requests if r.start_seconds is not None]
    return {
        **throughput_report(run, separate_cores=True),
        "scheduling_delay_seconds": {
            "p50": float(np.median(started)) if started else 0.0,
            "p99": float(np.percentile(started, 99)) if started else 0.0,
        },
        "utilisation": _utilisation(simulation, len(inputs.limits.num_blocks)) | _prefill_utilisation(simulation),
        "users": _users(simulation.steps),
        "gpu_only": service_figures(inputs.alone),
        "events": simulation.events,
        "copies_made": simulation.doubled,
        "simulated_steps": len(simulation.steps),
        "simulated_steps_per_second": len(simulation.steps) / simulation.wall_seconds,
        "machine": {"simulated": inputs.title, "assumptions": list(inputs.assumptions)},
    }


def simulation_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the report as text: what users notice first, then as ``bench throughput`` prints it."""
    each, users = report["tpot_seconds"], report["users"]
    if each["mean"]:
        yield (
            f"Each of {users['mean']:.0f} users at once (at most {users['max']}): {1 / each['mean']:.3g} tokens/s, "
            f"{each['mean'] * 1e3:.3g} ms per token (TPOT, p99 {each['p99'] * 1e3:.3g} ms); in all "
            f"{report['output_tokens_per_second']:.1f} output tokens/s"
        )
    if alone := report["gpu_only"]:
        yield (
            f"GPU alone, by the plan: each of {alone['users']} users at once "
            f"{alone['tokens_per_second_per_user']:.3g} tokens/s, {alone['tpot_seconds'] * 1e3:.3g} ms per token; "
            f"in all {alone['output_tokens_per_second']:.1f} output tokens/s"
        )
    first, between, delay = (report[f"{name}_seconds"] for name in ("ttft", "tbt", "scheduling_delay"))
    yield (
        f"Time to first token: p50 {first['p50']:.3g} s, p99 {first['p99']:.3g} s "
        f"(scheduling delay p50 {delay['p50']:.3g} s)"
    )
    yield f"Time between tokens: p50 {between['p50'] * 1e3:.3g} ms, p99 {between['p99'] * 1e3:.3g} ms"
    busy = report["utilisation"]
    if "prefill_workers" in busy:
        yield f"Prefill workers: {busy['prefill_workers']:.0%} busy with {busy['remote_prompts']} prompts"
    yield (
        f"Busy: S-worker {busy['s_worker']:.0%}, R-workers {busy['r_workers_mean']:.0%} "
        f"(the busiest {busy['r_workers_max']:.0%}) of {report['elapsed_time']:.4g} simulated seconds, "
        f"{report['simulated_steps']} steps at {report['simulated_steps_per_second']:.0f} a second"
    )
    if report["copies_made"]:
        yield f"Second copies made between steps: {report['copies_made']}"
    if report["events"]:
        yield from event_lines(report["events"])
    yield from summary_lines(report)


def _users(steps: list[StepRecord]) -> dict[str, float | int]:
    """Return how many sequences got a token per step: the mean over time, and the most."""
    seconds = sum(step.wall_seconds for step in steps)
    over_time = sum(step.num_output_tokens * step.wall_seconds for step in steps)
    return {
        "mean": over_time / seconds if seconds else 0.0,
        "max": max((step.num_output_tokens for step in steps), default=0),
    }


def json_number(number: float) -> float | str:
    """Return ``number`` for JSON, which has no infinity."""
    return "inf" if math.isinf(number) else number


def _utilisation(simulation: Simulation, num_r_workers: int) -> dict[str, float]:
    """Return the busy fractions of the simulated time, which includes waiting for arrivals.
    The mean divides by ``num_r_workers``. There may be more columns of R-workers, since one that returns after a loss
    may get a new index.
    """
    columns = list(zip_longest(*(step.r_seconds for step in simulation.steps), fillvalue=0.0))
    r_seconds = np.ascontiguousarray(np.array(columns).T).sum(axis=0) if columns else np.zeros(1)
    seconds = simulation.elapsed_seconds or 1.0
    return {
        "s_worker": sum(step.s_seconds for step in simulation.steps) / seconds,
        "r_workers_mean": float(r_seconds.sum()) / num_r_workers / seconds,
        "r_workers_max": float(r_seconds.max()) / seconds,
    }


def _prefill_utilisation(simulation: Simulation) -> dict[str, float]:
    """Return the busy fraction of prefill workers, and how many prompts they computed; {} without prefill workers."""
    fleet = simulation.prefill
    if fleet is None:
        return {}
    seconds = simulation.elapsed_seconds * fleet.num_workers or 1.0
    return {"prefill_workers": fleet.busy_seconds / seconds, "remote_prompts": fleet.num_prompts}


def _output(request: SimulatedRequest) -> RequestOutput:
    completion = CompletionOutput(0, "", (0,) * len(request.token_seconds), "length")
    metrics = RequestMetrics(request.arrival_seconds, tuple(request.token_seconds.tolist()))
    return RequestOutput("", None, request.prompt_token_ids, [completion], True, metrics)
