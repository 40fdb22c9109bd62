"""The simulator schedules as the live engine does, step by step, with real models, real R-workers and equal limits."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from helpers import model_zoo, r_workers
from helpers.examples import thinned
from helpers.hardware import PlainMachine
from helpers.processes import alive

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.metrics import StepRecord
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.lab.measure.dataset import WorkItem, WorkloadSpec, make_workload
from fastdecode.perfmodel.lab.measure.throughput import run_throughput
from fastdecode.perfmodel.lab.simulate import SimulatedRequest, Simulator, SplitMachine, Timeline, WorkerEvent
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import Scheduler

pytestmark = pytest.mark.slow

MACHINE = SplitMachine(StepModel(3, MeasuredSPart((1,), (1e-3,), (1e-3,)), RPart(1e-6), 3))
FIXED = {"random_input_len": 40, "random_output_len": 20, "num_prompts": 16}
VARIED = {**FIXED, "random_range_ratio": 0.5}
SHARED = {**FIXED, "random_prefix_len": 80}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny Llama and return its folder."""
    return str(model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama")))


def decisions(steps: list[StepRecord]) -> list[tuple[Any, ...]]:
    """Return the scheduler's decisions of each step, without the seconds."""
    return [(step.is_decode, step.num_tokens, step.num_output_tokens, step.kv_loads) for step in steps]


def simulated(scheduler: Scheduler, items: list[WorkItem]) -> list[StepRecord]:
    steps: list[StepRecord] = []
    requests = [SimulatedRequest(item.prompt_token_ids, item.output_len, item.arrival_seconds) for item in items]
    Simulator(scheduler, MACHINE, steps.append).run(requests)
    return steps


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        pytest.param({"schedule": "fcfs"}, FIXED, marks=pytest.mark.thorough),
        ({"schedule": "stall-free"}, FIXED),
        pytest.param({"schedule": "sls", "kv_load_limit": 500}, FIXED, marks=pytest.mark.thorough),
        ({"schedule": "sls", "kv_load_limit": 600, "prefill_scratch": "64KiB"}, VARIED),
        ({"schedule": "stall-free"}, SHARED),
        ({"schedule": "prefill-first", "kv_cache_memory": "1MiB"}, VARIED),
    ],
    ids=str,
)
def test_every_step_is_the_engines(
    folder: str, settings: dict[str, Any], lengths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs offline with three R-workers, two mini-batches, too few places, and shared prefixes.

    Its R-workers count as equally fast, as the simulated ones are, whatever else runs on this machine.
    """
    config = EngineConfig(
        folder, device="cpu", skip_tokenizer_init=True, max_model_len=256, block_size=16, max_num_seqs=12,
        max_num_batched_tokens=64, num_mini_batches=2, r_workers="inproc:3", s_threads=1, r_threads=1,
        enable_prefix_caching=lengths is SHARED, **{"kv_cache_memory": "16MiB", **settings},
    )  # fmt: skip
    engine = LLMEngine(config)
    monkeypatch.setattr(engine.scheduler, "observe", lambda *seen: None)
    try:
        items = make_workload(WorkloadSpec(**lengths), model_zoo.VOCABULARY, 256, None)
        live = run_throughput(engine, items)
        limits = engine.scheduler.limits
    finally:
        engine.close()
    scheduler = engine.scheduler.with_limits(limits)
    assert decisions(simulated(scheduler, items)) == decisions(live.steps)
    assert scheduler.statistics == live.statistics
    assert len(live.outputs) == len(items) and len(live.steps) > 30
    assert (live.statistics.prefix_hit_tokens > 0) == (lengths is SHARED)
    if settings["schedule"] == "sls":
        assert max(step.kv_load for step in live.steps) <= settings["kv_load_limit"]


LOSSES = [{"schedule": "stall-free"}, {"schedule": "sls", "kv_load_limit": 700}]


@pytest.mark.parametrize("settings", thinned(LOSSES, 2, 1), ids=str)
def test_every_step_is_the_engines_when_r_workers_are_lost(
    folder: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three processes are killed, each before a step with its rows, in both.

    The steps are the same again, with the same tokens computed once more. In simulated time a step takes a second.
    """
    losses = {12: 1, 25: 0}
    items = make_workload(WorkloadSpec(**FIXED), model_zoo.VOCABULARY, 256, None)
    live: list[StepRecord] = []
    with LLM(
        folder, device="cpu", skip_tokenizer_init=True, max_model_len=256, block_size=16, max_num_seqs=12,
        max_num_batched_tokens=64, num_mini_batches=2, r_workers="spawn:3", s_threads=1, r_threads=1,
        enable_prefix_caching=False, kv_cache_memory="16MiB", **settings,
    ) as llm:  # fmt: skip
        engine, pids = llm.engine, r_workers.spawned_pids(llm)
        monkeypatch.setattr(engine.scheduler, "observe", lambda *seen: None)
        engine.on_step = live.append
        for index, item in enumerate(items):
            params = SamplingParams(temperature=0, max_tokens=item.output_len, ignore_eos=True, detokenize=False)
            engine.add_request(str(index), {"prompt_token_ids": item.prompt_token_ids}, params)
        while engine.has_unfinished_requests():
            if (victim := losses.pop(len(live), None)) is not None:
                kill(pids[victim])
            engine.step()
        scheduler = engine.scheduler.with_limits(engine.scheduler.limits)
    steps: list[StepRecord] = []
    timeline = Timeline([WorkerEvent(12.5, "lose", 1), WorkerEvent(25.5, "lose", 0)])
    simulator = Simulator(scheduler, PlainMachine(), steps.append, events=timeline)
    simulator.run([SimulatedRequest(item.prompt_token_ids, item.output_len) for item in items])
    assert decisions(steps) == decisions(live)
    assert [step.lost_workers for step in steps] == [step.lost_workers for step in live]
    rows = sum(len(item.prompt_token_ids) + item.output_len - 1 for item in items)
    assert simulator.interruptions is not None
    assert simulator.interruptions.num_recomputed == sum(step.num_tokens for step in live) - rows > 200


def kill(pid: int) -> None:
    """Kill a process, and return once it is dead."""
    os.kill(pid, signal.SIGKILL)
    while alive(pid):
        time.sleep(0.01)
