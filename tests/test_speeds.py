"""How fast R-workers are, from what they were seen to do; oracle: two calls that share a core, second by second."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scheduler_harness import Job, Run
from test_load_control import AMPLE

from fastdecode.cluster.inproc import InprocBackend, InprocSettings
from fastdecode.scheduler.speeds import WorkerSpeeds
from fastdecode.types import CONTROL, SPAN, KVLayout, LayerLayout, StepPlan, WorkerPlan

NUM_SEQUENCES, CONTEXT, NUM_STEPS = 16, 1000, 10


def seconds_on_one_core(work: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Busy seconds of two R-workers that begin together: each has its weight's part until the other is done."""
    parts = weights / weights.sum()
    if (first := np.argmin(work / parts)) == 1:
        return seconds_on_one_core(work[::-1], weights[::-1])[::-1]
    end = work[first] / parts[first]
    return np.array([end, end + work[1] - end * parts[1]])


def test_speeds_are_as_seen_and_else_as_memory_was() -> None:
    speeds = WorkerSpeeds([10.0, 20.0, 20.0])
    assert speeds.relative.tolist() == [10.0, 20.0, 20.0]
    speeds.observe([1000, 600, 5], [0.010, 0.010, 0.001])  # the third was hardly at work
    assert speeds.relative == pytest.approx([100e3, 60e3, 20.0 * 160e3 / 30.0])
    for _ in range(100):
        speeds.observe([500, 600, 0], [0.010, 0.010, 0.0])
    assert speeds.relative[:2] == pytest.approx([50e3, 60e3], rel=0.02)


@pytest.mark.parametrize("policy", ["sls", "stall-free"])
def test_two_on_one_core_are_loaded_in_proportion_to_their_weights(policy: str) -> None:
    """Nobody is told of the weights, 2:1, and equal loads look like 1.33:1; yet newcomers settle at 2:1."""
    limits = replace(AMPLE, max_num_seqs=200, num_blocks=(9999, 9999), bandwidths=(1.0, 1.0))
    lengths = np.random.default_rng(0).integers(20, 60, 900).tolist()
    jobs = [Job([1] * 100, length, [length], number // 4 * 2) for number, length in enumerate(lengths)]
    run = Run(policy, limits, jobs, recounts=False)
    while run.step_number < 390:
        run.arrive_and_abort()
        step = run.step()
        if step.is_decode:
            busy = seconds_on_one_core(np.array(step.kv_loads) * 1e-6, np.array([2.0, 1.0]))
            run.scheduler.observe(step.num_tokens, step.kv_loads, 1e-3, busy.tolist())
        run.step_number += 1
    loads = np.array(run.kv_loads).T
    assert loads[0, 1] == loads[1, 1] > 0
    assert loads[0, -60:].sum() / loads[1, -60:].sum() == pytest.approx(2.0, rel=0.1)


def busy_seconds(backend: InprocBackend, context: int, num_rows: int) -> list[float]:
    """Of one step in which each R-worker's sequences grow by ``num_rows`` and the last row of each attends."""
    spans = np.array([(i, context, num_rows, int(num_rows == 1)) for i in range(NUM_SEQUENCES)], SPAN)
    backend.begin_step(StepPlan((WorkerPlan(np.zeros(0, CONTROL), (spans,)),) * 2))
    every = np.ones((2 * NUM_SEQUENCES * num_rows, 8, 64), np.float32)
    backend.submit(0, 0, every[: 2 * NUM_SEQUENCES * int(num_rows == 1)], every, every)
    backend.collect(0)
    return [float((worker.busy_end - worker.busy_start).sum()) for worker in backend.end_step().workers]


@pytest.fixture
def burnt_core() -> Iterator[int]:
    """A core on which another process of this session computes all the time."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    program = f"import os; os.sched_setaffinity(0, [{cores[-1]}])\nwhile 1: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        yield cores[-1]
        process.kill()


def be_humble(core: int) -> None:
    """Let this process's threads that are bound to ``core`` alone give way to the session's others."""
    for thread in (int(each.name) for each in Path("/proc/self/task").iterdir()):
        if os.sched_getaffinity(thread) == {core}:
            os.setpriority(os.PRIO_PROCESS, thread, 19)


def test_an_r_worker_whose_core_others_use_is_seen_to_be_slow(burnt_core: int) -> None:
    """Two real R-workers with the same load, one on a core of which it gets what another process leaves."""
    layer = LayerLayout(8, 8, 64, 64, 0.1)
    backend = InprocBackend(InprocSettings(2, 1 << 28, 32, 1, (min(os.sched_getaffinity(0)), burnt_core)))
    try:
        backend.open(KVLayout((layer,), "float32", "float32"))
        speeds = WorkerSpeeds([1.0, 1.0])
        busy_seconds(backend, context=0, num_rows=CONTEXT)
        be_humble(burnt_core)
        for step in range(NUM_STEPS):
            speeds.observe([1, 1], busy_seconds(backend, context=CONTEXT + step, num_rows=1))
        assert speeds.relative[0] > 1.5 * speeds.relative[1]
    finally:
        backend.close()
