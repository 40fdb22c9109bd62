"""One offline run of the engine beside its simulation: the same scheduler, the same limits, the same requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.bench.samples import NUM_LAYERS, measuring
from fastdecode.bench.throughput import run_throughput, warm_up
from fastdecode.bench.workload import WorkloadSpec, make_workload
from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.machine import usable_cores
from fastdecode.metrics import StepRecord
from fastdecode.perfmodel.deployment import Deployment, deployed_step_model
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.simulate import SimulatedRequest, Simulator, SplitMachine
from fastdecode.scheduler import Scheduler

SPEC = WorkloadSpec(random_input_len=64, random_output_len=96, num_prompts=96)
MAX_NUM_SEQS = 48


@dataclass(frozen=True)
class OfflineRun:
    """Total seconds as simulated and as measured; ``same_schedule``: every step the same rows and loads."""

    simulated_seconds: float
    measured_seconds: float
    num_steps: int
    same_schedule: bool

    @property
    def error(self) -> float:
        """Simulated over measured, less one."""
        return self.simulated_seconds / self.measured_seconds - 1.0


def run_offline(
    config: EngineConfig, profile: HardwareProfile, spec: WorkloadSpec = SPEC, threads: int | None = None
) -> OfflineRun:
    """Fixed lengths, the load-stabilizing schedule within the load limit of ``profile``, S and R in turn, both with
    ``threads`` (all cores)."""
    cores = threads or len(usable_cores())
    config = replace(
        measuring(config), hf_overrides={**config.hf_overrides, "num_hidden_layers": NUM_LAYERS}, schedule="sls",
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=256, num_mini_batches=1, s_threads=cores, r_threads=cores,
        kv_cache_memory="1GiB",
    )  # fmt: skip
    engine = LLMEngine(config)
    try:
        shape = engine.s_model.shape
        model = deployed_step_model(profile, shape, engine.s_model.layout.kv_dtype, Deployment(cores, cores))
        balanced = int(model.balanced_kv_tokens(MAX_NUM_SEQS))
        limits = replace(engine.scheduler.limits, balanced_kv_tokens=balanced)
        engine.scheduler = Scheduler(engine.scheduler.policy, limits)
        items = make_workload(spec, engine.s_model.vocab_size, engine.s_model.max_model_len, None)
        warm_up(engine, items)
        live = run_throughput(engine, items)
    finally:
        engine.close()
    steps: list[StepRecord] = []
    simulator = Simulator(Scheduler(engine.scheduler.policy, limits), SplitMachine(model), steps.append)
    simulator.run([SimulatedRequest(item.prompt_token_ids, item.output_len, item.arrival_seconds) for item in items])
    decided = [
        [(step.num_tokens, step.num_output_tokens, step.kv_loads) for step in run] for run in (live.steps, steps)
    ]
    return OfflineRun(simulator.now_seconds, live.elapsed_seconds, len(live.steps), decided[0] == decided[1])


def offline_line(run: OfflineRun) -> str:
    """For people."""
    same = "the same schedule step by step" if run.same_schedule else "ANOTHER schedule"
    return (
        f"Offline, {SPEC.num_prompts} requests of {SPEC.random_input_len} + {SPEC.random_output_len} tokens, "
        f"{run.num_steps} steps: simulated {run.simulated_seconds:.2f} s, measured {run.measured_seconds:.2f} s "
        f"({run.error:+.1%}), {same}"
    )
