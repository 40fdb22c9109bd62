"""What changes is followed at once, what passes is not; and who attends follows it."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode.scheduler.policy.recent_speeds import NUM_STEPS, RecentSpeeds
from fastdecode.scheduler.store.workers import Workers

LOADS = [1000, 1000, 1000]
USUAL = [0.1, 0.1, 0.05]


def seen(workers: Workers, steps: int = 20) -> RecentSpeeds:
    found = RecentSpeeds(workers)
    for _ in range(steps):
        found.observe(LOADS, USUAL)
    return found


def relative(found: RecentSpeeds) -> np.ndarray:
    return found.speeds / found.speeds.sum()


def test_a_change_is_followed_at_once_and_a_passing_one_is_not() -> None:
    found = seen(Workers([1] * 3, [1.0, 1.0, 1.0], 1))
    before = relative(found)
    assert before == pytest.approx([0.25, 0.25, 0.5])
    for _ in range(NUM_STEPS - 1):
        found.observe(LOADS, [0.2, 0.1, 0.05])
    assert relative(found) == pytest.approx(before, rel=0.15), "two steps may be chance"
    found.observe(LOADS, USUAL)
    found.observe(LOADS, [0.2, 0.1, 0.05])
    found.observe(LOADS, [0.05, 0.1, 0.05])  # not the same way
    assert relative(found) == pytest.approx(before, rel=0.2)
    for _ in range(NUM_STEPS):
        found.observe(LOADS, [0.2, 0.1, 0.05])
    assert relative(found) == pytest.approx(np.array([0.5, 1, 2]) / 3.5, rel=0.02)


def test_what_slows_all_alike_is_no_change_and_short_steps_say_little() -> None:
    workers = Workers([1] * 3, [1.0, 1.0, 1.0], 1)
    found = seen(workers)
    for _ in range(NUM_STEPS):
        found.observe(LOADS, [3 * each for each in USUAL])
    assert relative(found) == pytest.approx([0.25, 0.25, 0.5])
    assert seen(workers, 0).speeds.tolist() == [1.0, 1.0, 1.0]
    idle = seen(workers)
    idle.observe([1000, 1000, 0], [0.1, 0.1, 0.0])  # one that attends nothing keeps its speed
    assert relative(idle) == pytest.approx([0.25, 0.25, 0.5])


def test_one_that_joins_in_the_place_of_another_is_unknown_again() -> None:
    workers = Workers([1] * 3, [1.0, 1.0, 1.0], 1)
    found = seen(workers)
    workers.join(3, 1, 1.0)
    assert len(found.speeds) == 4 and found.speeds.min() > 0
    for _ in range(2):
        found.observe([*LOADS, 500], [*USUAL, 0.1])
    assert relative(found) == pytest.approx(np.array([2, 2, 4, 1]) / 9)
    found.forget(2)
    assert found.speeds.tolist() == workers.speeds.tolist()
