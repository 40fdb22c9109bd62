"""How fast R-workers are, from what they were seen to do; oracle: two calls that share a core, second by second."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.scheduler_harness import AMPLE, Job, Run

from fastdecode.scheduler.store.workers import Workers

pytestmark = pytest.mark.slow


def seconds_on_one_core(work: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Busy seconds of two R-workers that begin together: each has its weight's part until the other is done."""
    parts = weights / weights.sum()
    if (first := np.argmin(work / parts)) == 1:
        return seconds_on_one_core(work[::-1], weights[::-1])[::-1]
    end = work[first] / parts[first]
    return np.array([end, end + work[1] - end * parts[1]])


def test_speeds_are_as_seen_and_else_as_memory_was() -> None:
    workers = Workers([1] * 3, [10.0, 20.0, 20.0], 1)
    assert workers.speeds.tolist() == [10.0, 20.0, 20.0]
    for _ in range(4):
        workers.observe([1000, 600, 5], [0.010, 0.010, 0.001])  # the third was hardly at work
        assert workers.speeds.tolist() == [10.0, 20.0, 20.0], "too short to say anything"
    for _ in range(4):
        workers.observe([1000, 600, 5], [0.010, 0.010, 0.001])
    assert workers.speeds == pytest.approx([100e3, 60e3, 20.0 * 160e3 / 30.0])
    for _ in range(100):
        workers.observe([500, 600, 0], [0.010, 0.010, 0.0])
    assert workers.speeds[:2] == pytest.approx([50e3, 60e3], rel=0.02)


def test_what_is_as_expected_but_for_chance_stays() -> None:
    workers = Workers([1] * 2, [10.0, 20.0], 1)
    for _ in range(10):
        workers.observe([1000, 1900], [0.010, 0.010])
    assert workers.speeds.tolist() == [10.0, 20.0]


@pytest.mark.parametrize("schedule", ["sls", "stall-free"])
def test_two_on_one_core_are_loaded_in_proportion_to_their_weights(schedule: str) -> None:
    """The scheduler is not told of the weights, 2:1, and equal loads look like 1.33:1; yet newcomers settle at 2:1."""
    limits = replace(AMPLE, max_num_seqs=200, num_blocks=(9999, 9999), bandwidths=(1.0, 1.0))
    lengths = np.random.default_rng(0).integers(20, 60, 900).tolist()
    jobs = [Job([1] * 100, length, [length], number // 4 * 2) for number, length in enumerate(lengths)]
    run = Run(schedule, limits, jobs, recounts=False)
    while run.step_number < 390:
        run.arrive_and_abort()
        step = run.step()
        if step.is_decode:
            busy = seconds_on_one_core(np.array(step.kv_loads) * 1e-6, np.array([2.0, 1.0]))
            run.scheduler.observe(step, 1e-3, float(busy.max()), busy.tolist())
        run.step_number += 1
    loads = np.array(run.kv_loads).T
    assert loads[0, 1] == loads[1, 1] > 0
    assert loads[0, -60:].sum() / loads[1, -60:].sum() == pytest.approx(2.0, rel=0.1)


def test_one_that_is_very_slow_is_seen_beside_the_others() -> None:
    """It takes ten times as long over the same tokens; the others' short times tell as much."""
    workers = Workers([1, 1], [1.0, 1.0], 1)
    for _ in range(10):
        workers.observe([1000, 1000], [0.100, 0.010])
    assert workers.speeds[1] / workers.speeds[0] == pytest.approx(10.0)
