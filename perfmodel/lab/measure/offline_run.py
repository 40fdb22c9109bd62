"""One offline run of the engine and its simulation, with the same scheduler, limits and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.core.machine import usable_cores
from fastdecode.core.metrics import StepRecord
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.calibration import Anchor, steadily
from fastdecode.perfmodel.deployment import Deployment, Drift, deployed_step_model
from fastdecode.perfmodel.lab.measure.dataset import WorkItem, WorkloadSpec, make_workload
from fastdecode.perfmodel.lab.measure.samples import NUM_LAYERS, measuring
from fastdecode.perfmodel.lab.measure.throughput import run_throughput, warm_up
from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun
from fastdecode.perfmodel.lab.simulate import SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import Scheduler

SPEC = WorkloadSpec(random_input_len=64, random_output_len=96, num_prompts=96)
MAX_NUM_SEQS = 48


@dataclass(frozen=True)
class OfflineRun:
    """A workload's seconds, simulated and measured. ``same_schedule``: all steps had the same rows and KV loads."""

    simulated_seconds: float
    measured_seconds: float
    num_steps: int
    same_schedule: bool

    @property
    def error(self) -> float:
        """The simulation's relative error: simulated seconds over measured seconds, minus one."""
        return self.simulated_seconds / self.measured_seconds - 1.0


def run_offline(
    config: EngineConfig,
    profile: HardwareProfile,
    anchors: Sequence[Anchor] = (),
    spec: WorkloadSpec = SPEC,
    threads: int | None = None,
) -> OfflineRun:
    """Run and simulate requests of fixed lengths, with the load-stabilizing schedule and the profile's load limit.
    S-worker and R-worker take turns with ``threads`` threads each (None: one per core). ``anchors``: reference calls of
    the S-part and of the R-part with as many threads. Simulated times grow by the drift of these calls.
    """
    cores = threads or len(usable_cores())
    engine = LLMEngine(_offline_config(config, cores))
    try:
        predicted = partial(
            deployed_step_model, profile, engine.s_model.shape, engine.s_model.layout.kv_dtype,
            Deployment(cores, cores),
        )  # fmt: skip
        balanced = predicted().balanced_kv_tokens_each(MAX_NUM_SEQS)
        limits = replace(engine.scheduler.limits, balanced_kv_tokens=balanced)
        engine.replace_scheduler(engine.scheduler.with_limits(limits))
        items = make_workload(spec, engine.s_model.vocab_size, engine.s_model.max_model_len, None)
        warm_up(engine, items)
        runs: list[ThroughputRun] = []
        steadied = steadily(anchors, partial(_run_again, engine, items, runs))
    finally:
        engine.close()
    model = predicted(drift=Drift(*(each.drift for each in steadied)))
    seconds, steps = _simulated(engine.scheduler.with_limits(limits), model, items)
    same = all(_decisions(run.steps) == _decisions(steps) for run in runs)
    return OfflineRun(seconds, float(steadied[0].samples[0, 0]), len(steps), same)


def _offline_config(config: EngineConfig, cores: int) -> EngineConfig:
    return replace(
        measuring(config), hf_overrides={**config.hf_overrides, "num_hidden_layers": NUM_LAYERS}, schedule="sls",
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=256, num_mini_batches=1, s_threads=cores, r_threads=cores,
        kv_cache_memory="1GiB",
    )  # fmt: skip


def _run_again(engine: LLMEngine, items: Sequence[WorkItem], runs: list[ThroughputRun]) -> np.ndarray:
    """Run ``items`` once more, append the run to ``runs``, and return its seconds as an array [1, 1]."""
    runs.append(run_throughput(engine, items))
    return np.array([[runs[-1].elapsed_seconds]])


def _simulated(scheduler: Scheduler, model: StepModel, items: Sequence[WorkItem]) -> tuple[float, list[StepRecord]]:
    """Simulate ``items``; return the simulated seconds and the record of every step."""
    steps: list[StepRecord] = []
    simulator = Simulator(scheduler, SplitMachine(model), steps.append)
    simulator.run([SimulatedRequest(item.prompt_token_ids, item.output_len, item.arrival_seconds) for item in items])
    return simulator.now_seconds, steps


def _decisions(steps: Sequence[StepRecord]) -> list[tuple[Any, ...]]:
    return [(step.num_tokens, step.num_output_tokens, step.kv_loads) for step in steps]


def offline_line(run: OfflineRun) -> str:
    """Describe ``run`` in one line of text."""
    same = "the same schedule step by step" if run.same_schedule else "ANOTHER schedule"
    return (
        f"Offline, {SPEC.num_prompts} requests of {SPEC.random_input_len} + {SPEC.random_output_len} tokens, "
        f"{run.num_steps} steps: simulated {run.simulated_seconds:.2f} s, measured {run.measured_seconds:.2f} s "
        f"({run.error:+.1%}), {same}"
    )
