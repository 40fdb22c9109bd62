"""The speeds of R-workers from their observed times; the oracle is two calls that share a core.

A lasting change is followed at once, and a passing one is not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.scheduler_harness import AMPLE, Job, Run

from fastdecode.scheduler.places.speeds import NUM_STEPS, Speeds

LOADS = [1000, 1000, 1000]
USUAL = [0.1, 0.1, 0.05]


def seen(steps: int = 20) -> Speeds:
    found = Speeds([1.0, 1.0, 1.0])
    for _ in range(steps):
        found.observe(LOADS, USUAL)
    return found


def relative(found: Speeds) -> np.ndarray:
    latest = found.latest(range(len(found.bandwidths)))
    return latest / latest.sum()


pytestmark = pytest.mark.slow


def seconds_on_one_core(work: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the busy seconds of two R-workers that begin together.

    Each has its weight's part of the core until the other is done.
    """
    parts = weights / weights.sum()
    if (first := np.argmin(work / parts)) == 1:
        return seconds_on_one_core(work[::-1], weights[::-1])[::-1]
    end = work[first] / parts[first]
    return np.array([end, end + work[1] - end * parts[1]])


def test_speeds_are_as_seen_and_else_as_memory_was() -> None:
    speeds = Speeds([10.0, 20.0, 20.0])
    assert speeds.lasting.tolist() == [10.0, 20.0, 20.0]
    for _ in range(4):
        speeds.observe([1000, 600, 5], [0.010, 0.010, 0.001])  # The third R-worker hardly worked.
        assert speeds.lasting.tolist() == [10.0, 20.0, 20.0], "too short to say anything"
    for _ in range(4):
        speeds.observe([1000, 600, 5], [0.010, 0.010, 0.001])
    assert speeds.lasting == pytest.approx([100e3, 60e3, 20.0 * 160e3 / 30.0])
    for _ in range(100):
        speeds.observe([500, 600, 0], [0.010, 0.010, 0.0])
    assert speeds.lasting[:2] == pytest.approx([50e3, 60e3], rel=0.02)


def test_what_is_as_expected_but_for_chance_stays() -> None:
    speeds = Speeds([10.0, 20.0])
    for _ in range(10):
        speeds.observe([1000, 1900], [0.010, 0.010])
    assert speeds.lasting.tolist() == [10.0, 20.0]


@pytest.mark.parametrize("schedule", [pytest.param("sls", marks=pytest.mark.thorough), "stall-free"])
def test_two_on_one_core_are_loaded_in_proportion_to_their_weights(schedule: str) -> None:
    """Equal loads look like 1.33:1 for weights of 2:1, which the scheduler does not know; yet loads settle at 2:1."""
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
    """One R-worker takes ten times as long over the same tokens, and the others' short times count as much."""
    speeds = Speeds([1.0, 1.0])
    for _ in range(10):
        speeds.observe([1000, 1000], [0.100, 0.010])
    assert speeds.lasting[1] / speeds.lasting[0] == pytest.approx(10.0)


def test_a_change_is_followed_at_once_and_a_passing_one_is_not() -> None:
    found = seen()
    before = relative(found)
    assert before == pytest.approx([0.25, 0.25, 0.5])
    for _ in range(NUM_STEPS - 1):
        found.observe(LOADS, [0.2, 0.1, 0.05])
    assert relative(found) == pytest.approx(before, rel=0.15), "two steps may be chance"
    found.observe(LOADS, USUAL)
    found.observe(LOADS, [0.2, 0.1, 0.05])
    found.observe(LOADS, [0.05, 0.1, 0.05])  # The change does not point the same way.
    assert relative(found) == pytest.approx(before, rel=0.2)
    for _ in range(NUM_STEPS):
        found.observe(LOADS, [0.2, 0.1, 0.05])
    assert relative(found) == pytest.approx(np.array([0.5, 1, 2]) / 3.5, rel=0.02)


def test_what_slows_all_alike_is_no_change_and_short_steps_say_little() -> None:
    found = seen()
    for _ in range(NUM_STEPS):
        found.observe(LOADS, [3 * each for each in USUAL])
    assert relative(found) == pytest.approx([0.25, 0.25, 0.5])
    assert seen(0).latest([0, 1, 2]).tolist() == [1.0, 1.0, 1.0]
    idle = seen()
    idle.observe([1000, 1000, 0], [0.1, 0.1, 0.0])  # An R-worker that attends nothing keeps its speed.
    assert relative(idle) == pytest.approx([0.25, 0.25, 0.5])


def test_one_that_joins_in_the_place_of_another_is_unknown_again() -> None:
    found = seen()
    found.join(3, 1.0)
    assert len(found.lasting) == 4 and found.latest(range(4)).min() > 0
    for _ in range(2):
        found.observe([*LOADS, 500], [*USUAL, 0.1])
    assert relative(found) == pytest.approx(np.array([2, 2, 4, 1]) / 9)
    found.join(2, 1.0)
    assert found.latest(range(4)).tolist() == found.lasting.tolist()


def test_one_that_was_busy_for_no_token_is_compared_with_none() -> None:
    """Only appends took its time, so its time per token is unknown, and it is compared with no other."""
    found = Speeds([1.0, 1.0, 1.0])
    with np.errstate(all="raise"):
        for _ in range(NUM_STEPS):
            found.observe([1000, 1000, 0], USUAL)
        for _ in range(2 * NUM_STEPS):
            found.observe(LOADS, USUAL)
    assert np.isfinite(found.lasting).all() and relative(found)[2] > relative(found)[0]
