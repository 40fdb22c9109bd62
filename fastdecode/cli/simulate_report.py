"""The figures of a simulation, with the names that ``bench throughput`` gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode.bench.report import summary_lines, throughput_report
from fastdecode.bench.throughput import ThroughputRun
from fastdecode.cli.simulate_inputs import SimulationInputs
from fastdecode.metrics import StepRecord
from fastdecode.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fastdecode.perfmodel.simulate import SimulatedRequest
from fastdecode.scheduler import SchedulerStatistics


@dataclass(frozen=True)
class Simulation:
    """What a run left behind. ``elapsed_seconds`` is simulated, ``wall_seconds`` is what it took to simulate."""

    requests: list[SimulatedRequest]
    steps: list[StepRecord]
    elapsed_seconds: float
    wall_seconds: float
    statistics: SchedulerStatistics
    kv_load_limit: int | None
    interrupted: bool = False


def simulation_report(simulation: Simulation, inputs: SimulationInputs) -> dict[str, Any]:
    """All keys of ``bench throughput`` but ``config``, and what only a simulation knows."""
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
        "utilisation": _utilisation(simulation),
        "simulated_steps": len(simulation.steps),
        "simulated_steps_per_second": len(simulation.steps) / simulation.wall_seconds,
        "machine": {"simulated": inputs.title, "assumptions": list(inputs.assumptions)},
    }


def simulation_lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for people: latencies first, then as ``bench throughput`` prints it."""
    first, between, delay = (report[f"{name}_seconds"] for name in ("ttft", "tbt", "scheduling_delay"))
    yield (
        f"Time to first token: p50 {first['p50']:.3g} s, p99 {first['p99']:.3g} s "
        f"(scheduling delay p50 {delay['p50']:.3g} s)"
    )
    yield f"Time between tokens: p50 {between['p50'] * 1e3:.3g} ms, p99 {between['p99'] * 1e3:.3g} ms"
    busy = report["utilisation"]
    yield (
        f"Busy: S-worker {busy['s_worker']:.0%}, R-workers {busy['r_workers_mean']:.0%} "
        f"(the busiest {busy['r_workers_max']:.0%}) of {report['elapsed_time']:.4g} simulated seconds, "
        f"{report['simulated_steps']} steps at {report['simulated_steps_per_second']:.0f} a second"
    )
    yield from summary_lines(report)


def json_number(number: float) -> float | str:
    """JSON knows no infinity."""
    return "inf" if math.isinf(number) else number


def _utilisation(simulation: Simulation) -> dict[str, float]:
    """Busy parts of the whole simulated time, idle waits for arrivals included."""
    r_seconds = np.sum([step.r_seconds for step in simulation.steps], axis=0) if simulation.steps else np.zeros(1)
    seconds = simulation.elapsed_seconds or 1.0
    return {
        "s_worker": sum(step.s_seconds for step in simulation.steps) / seconds,
        "r_workers_mean": float(r_seconds.mean()) / seconds,
        "r_workers_max": float(r_seconds.max()) / seconds,
    }


def _output(request: SimulatedRequest) -> RequestOutput:
    completion = CompletionOutput(0, "", (0,) * len(request.token_seconds), "length")
    metrics = RequestMetrics(request.arrival_seconds, tuple(request.token_seconds.tolist()))
    return RequestOutput("", None, request.prompt_token_ids, [completion], True, metrics)
