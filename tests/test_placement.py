"""The placement of new sequences, against every other choice and against all assignments of a few."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers.examples import examples, thinned
from helpers.scheduler_harness import AMPLE, Job, Run
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.core.placing import Placing
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer, placement_costs

pytestmark = pytest.mark.slow

Sizes = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=7)
EMPTY = np.zeros(0, np.int64)
AMPLE_ROOM = 10**9


def loads_over_time(sizes: Sizes, workers: tuple[int, ...], num_workers: int) -> np.ndarray:
    """Return loads step by step of sequences (prompt, decode steps), whose prompts are all computed in step 0."""
    loads = np.zeros((num_workers, 1 + max(steps for _, steps in sizes)))
    for (prompt_len, steps), worker in zip(sizes, workers, strict=True):
        for step in range(1, steps + 1):
            loads[worker, step] += prompt_len + step
    return loads


@given(SIZES, st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=4))
@settings(max_examples=examples(300))
def test_a_newcomer_goes_where_the_sum_of_squares_grows_least(sizes: Sizes, speeds: list[float]) -> None:
    """Differences of cost equal those of Σ speed · time² over all R-workers and steps, counted step by step."""
    relative = np.array(speeds)
    forecast = LoadForecast(EMPTY, EMPTY, EMPTY, len(speeds), AMPLE_ROOM)
    placed: tuple[int, ...] = ()
    for count, (prompt_len, steps) in enumerate(sizes, 1):
        prompt = Newcomer(0, prompt_len, prompt_len, steps)
        room = np.full(len(speeds), AMPLE_ROOM)
        costs = placement_costs(forecast, prompt, relative, room, {}, 1.0)
        squares = [
            (loads_over_time(sizes[:count], (*placed, worker), len(speeds)) ** 2 / relative[:, None]).sum()
            for worker in range(len(speeds))
        ]
        attended = sum(prompt_len + step for step in range(1, steps + 1))
        expected = np.array(squares) / (2 * attended) * relative.mean()
        np.testing.assert_allclose(costs - costs[0], expected - expected[0], rtol=1e-9, atol=1e-6 * expected.max())
        worker = int(np.argmin(costs))
        forecast.add(Newcomer(worker, prompt_len, prompt_len, steps))
        placed = (*placed, worker)


@given(SIZES)
@settings(max_examples=examples(200))
def test_a_crowd_lies_nearly_as_evenly_as_it_can(sizes: Sizes) -> None:
    """The busiest R-worker's time, summed over steps, is at most half as long again as the best assignment's.

    The best of all assignments to two R-workers knows all sequences beforehand. All guarantees hold in every step.
    """
    jobs = [Job([1] * prompt_len, steps + 1, [steps + 1]) for prompt_len, steps in sizes]
    limits = AMPLE.__class__(**{**vars(AMPLE), "num_blocks": (999, 999), "bandwidths": (1.0, 1.0)})
    run = Run("fcfs", limits, jobs)
    run.to_the_end()
    ours = np.array(run.kv_loads).max(axis=1).sum()
    best = min(loads_over_time(sizes, each, 2).max(axis=0).sum() for each in product((0, 1), repeat=len(sizes)))
    assert best <= ours <= 1.5 * best


def test_many_newcomers_lie_as_evenly_as_one_can_wish() -> None:
    """With 200 sequences of mixed lengths on four R-workers the busiest is within 6 % of the mean while they come."""
    rng = np.random.default_rng(3)
    jobs = [Job([1] * int(rng.integers(1, 30)), 90, [int(rng.integers(10, 90))]) for _ in range(600)]
    for job in jobs:
        job.max_tokens = job.lengths[0]
    limits = AMPLE.__class__(
        **{**vars(AMPLE), "max_num_seqs": 160, "num_blocks": (9999,) * 4, "bandwidths": (1.0,) * 4}
    )
    run = Run("stall-free", limits, jobs, recounts=False)
    run.to_the_end()
    loads = np.array(run.kv_loads)[40:150]
    assert (loads.max(axis=1) / loads.mean(axis=1)).mean() <= 1.06


def test_hits_and_memory_are_costs_too() -> None:
    """A prefix is worth the rows that it saves, spread over the sequence's steps, and a lack of memory costs them."""
    forecast = LoadForecast(EMPTY, EMPTY, EMPTY, 2, AMPLE_ROOM)
    forecast.add(Newcomer(0, 100, 100, 50))
    prompt, ample = Newcomer(0, 64, 64, 20), np.array([AMPLE_ROOM, AMPLE_ROOM])
    plain = placement_costs(forecast, prompt, np.ones(2), ample, {}, 40.0)
    assert plain[0] - plain[1] > 100
    hit = placement_costs(forecast, prompt, np.ones(2), ample, {0: 60}, 40.0)
    assert hit[0] == plain[0] - 60 * 40 / 20 and hit[1] == plain[1]
    tight = placement_costs(forecast, prompt, np.ones(2), np.array([AMPLE_ROOM, 64]), {}, 40.0)
    assert tight[1] == plain[1] + 20 * 40 / 20
    slow = placement_costs(forecast, prompt, np.array([8.0, 1.0]), ample, {}, 0.0)
    assert slow[0] < slow[1]


@pytest.mark.parametrize("schedule", thinned(["stall-free", "sls", "fcfs"], 3))
def test_twice_the_memory_needed_is_enough(schedule: str) -> None:
    """Eight R-workers hold twice what all seats take at full length, and no sequence is preempted."""
    rng = np.random.default_rng(5)
    lengths = [int(rng.integers(12, 108)) for _ in range(400)]
    jobs = [Job([1] * 16, length, [length], number // 8) for number, length in enumerate(lengths)]
    seats, mean_len = 64, 16 + 60
    blocks = 2 * seats * mean_len // AMPLE.block_size // 8
    limits = replace(AMPLE, max_num_seqs=seats, num_blocks=(blocks,) * 8, bandwidths=(1.0,) * 8)
    run = Run(schedule, limits, jobs, recounts=False)
    run.to_the_end()
    assert run.scheduler.statistics.preemptions == 0
    assert max(map(max, run.kv_loads)) > blocks * AMPLE.block_size / 4, "memory was hardly used"


@pytest.mark.parametrize("slowness", [(1.0, 1.0), (3.0, 1.0), (1.0, 7.0)])
def test_closed_ranges_attend_where_they_even_the_load(slowness: tuple[float, float]) -> None:
    """Ranges of 16 tokens on two R-workers make each step as even as whole ranges allow, if one is slow too.

    The oracle tries all numbers of ranges on the first R-worker, and the tail on either.
    """
    limits = replace(
        AMPLE, block_size=4, num_blocks=(999, 999), bandwidths=(1.0, 1.0), placing=Placing(16, 2),
        seconds_per_moved_token=1e-9,
    )  # fmt: skip
    run = Run("stall-free", limits, [Job([1] * 130, 60, [60])])
    run.seconds_per_token = slowness
    run.arrive_and_abort()
    for _ in range(50):
        run.step()
        run.move(9)
    while run.scheduler.snapshot().pool[1:] != (0, 1):
        run.step()
        run.move(9)
    run.step()
    total = sum(run.kv_loads[-1])
    whole, tail = (total - 1) // 16, (total - 1) % 16 + 1
    options = [16 * i + tail * with_tail for i in range(whole + 1) for with_tail in (0, 1)]
    best = min(max(slowness[0] * first, slowness[1] * (total - first)) for first in options)
    assert max(np.array(run.kv_loads[-1]) * slowness) <= 1.01 * best, (run.kv_loads[-1], best)
