"""The load-stabilizing schedule: its forecast against a run, the paper's figures, and its guarantees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.examples import SEES_ALL, examples
from helpers.scheduler_harness import AMPLE, Job, Run
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError
from fastdecode.engine.compose.timed_steps import budget_within
from fastdecode.perfmodel.step_model import MeasuredStepTime
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.policy.load_control import LoadControl
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer
from fastdecode.scheduler.policy.load_limit import NUM_STEPS, BalanceFinder, LoadLimit
from fastdecode.scheduler.policy.output_lengths import MIN_ENDED, OutputLengths
from fastdecode.scheduler.sequence import Sizes

pytestmark = pytest.mark.slow


def loads_of(run: Run) -> np.ndarray:
    """Return the KV tokens attended per R-worker and step, [num_workers, num_steps]."""
    return np.array(run.kv_loads).T


@st.composite
def known_runs(draw: st.DrawFn) -> Run:
    """Draw runs whose lengths end at max_tokens, with prompts of all sizes, siblings, arrivals and 1 to 3 R-workers."""
    jobs = []
    for _ in range(draw(st.integers(1, 10))):
        length, n = draw(st.integers(1, 30)), draw(st.integers(1, 3))
        jobs.append(Job([1] * draw(st.integers(1, 70)), length, [length] * n, draw(st.integers(0, 10))))
    num_workers = draw(st.integers(1, 3))
    tokens = 30 + draw(st.integers(0, 40))
    changes = {"max_num_seqs": 30, "num_blocks": (9999,) * num_workers, "bandwidths": (1.0,) * num_workers}
    limits = replace(AMPLE, max_num_batched_tokens=tokens, kv_load_limit=1 << 30, **changes)
    return Run(draw(st.sampled_from(["sls", "stall-free"])), limits, jobs)


@pytest.mark.thorough
@given(known_runs(), st.integers(0, 30))
@settings(max_examples=examples(600))
def test_the_forecast_is_what_happens(run: Run, look_at: int) -> None:
    """The forecast holds per R-worker to the end, from the first step after ``look_at`` at which none waits."""
    last_arrival = max(job.arrives for job in run.jobs)
    forecast, first = np.zeros((0, 0)), 0
    while run.step_number <= last_arrival or run.alive:
        run.arrive_and_abort()
        if (
            run.step_number >= max(look_at, last_arrival)
            and not forecast.size
            and not run.scheduler.snapshot().num_waiting
        ):
            run.scheduler.store.residents.table.refresh()
            run.scheduler.admission.begin_step()
            forecast, first = run.scheduler.admission.future.forecast().loads.copy(), len(run.kv_loads)
        if run.alive:
            run.step()
        run.step_number += 1
    happened = loads_of(run)[:, first:] if run.kv_loads[first:] else np.zeros((len(forecast), 0))
    if forecast.size:
        steps = max(forecast.shape[1], happened.shape[1])
        padded = [np.pad(loads, ((0, 0), (0, steps - loads.shape[1]))) for loads in (forecast, happened)]
        np.testing.assert_array_equal(*padded)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), max_size=6),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20), st.integers(0, 2)), max_size=4),
    st.integers(10, 40),
)
@settings(max_examples=examples(600))
def test_the_forecast_adds_up(running: list[tuple[int, int]], prompts: list[tuple[int, int, int]], budget: int) -> None:
    """The forecast equals a step-by-step count: decodes take rows first, and prompts the rest in order."""
    cached, steps = np.array([r[0] for r in running], int), np.array([r[1] for r in running], int)
    forecast = LoadForecast(np.zeros(len(running), int), cached, steps, 1, budget)
    decoding = [[c, d] for c, d in running]
    left = [[length, length, d, n] for length, d, n in prompts]
    peaks = []
    for length, d, n in prompts:
        prompt = Newcomer(0, length, length, d, n)
        peaks.append(forecast.peak_with(prompt, 0))
        assert forecast.peaks_with(prompt).tolist() == peaks[-1:]
        forecast.add(prompt)
    expected = []
    while any(d > 0 for _, d in decoding) or left:
        now = [entry for entry in decoding if entry[1] > 0]
        expected.append(sum(c + 1 for c, _ in now))
        room = max(0, budget - len(now))
        for entry in now:
            entry[0], entry[1] = entry[0] + 1, entry[1] - 1
        while left and room:
            taken = min(room, left[0][1])
            room, left[0][1] = room - taken, left[0][1] - taken
            if left[0][1] == 0:
                length, _, d, n = left.pop(0)
                decoding += [[length, d] for _ in range(1 + n)]
        assert len(expected) < 500
    size = max(len(expected), forecast.horizon)
    found = np.pad(forecast.loads[0], (0, size - forecast.horizon))
    np.testing.assert_array_equal(found, np.pad(expected, (0, size - len(expected))))
    assert all(peak <= max(expected) for peak in peaks)


@pytest.mark.parametrize(
    ("in_flight", "length", "interval", "micro_batch", "peak", "peak_together"),
    [
        (6, 6, 2, 2, 24, 36),
        (192, 192, 8, 8, 19_200, 192 * 192),
        pytest.param(1024, 1024, 32, 32, 540_672, 1024 * 1024, marks=pytest.mark.thorough),
    ],
)
def test_the_papers_figures(
    in_flight: int, length: int, interval: int, micro_batch: int, peak: int, peak_together: int
) -> None:
    """M = B·F/S sequences start every F steps, and the peak is B(S+F)/2 instead of B·S (section 4.2).

    The run ends once the first sequences after the first round have started, since the peak comes before.
    """
    limits = replace(
        AMPLE,
        max_num_seqs=in_flight,
        max_num_batched_tokens=2 * in_flight,
        kv_load_limit=in_flight * (length + interval) // 2,
        micro_batch_interval=interval,
    )
    is_short = in_flight < 100
    jobs = [Job([1], length, [length]) for _ in range(2 * in_flight)]
    run = Run("sls", limits, jobs, recounts=is_short)
    if is_short:
        run.to_the_end()
    while not is_short and len(run.starts) < in_flight + 4 * micro_batch:
        run.one_step()
    starts = np.bincount([step for step, _ in run.starts])
    first_round = starts[:length]
    assert np.flatnonzero(first_round).tolist() == list(range(0, length, interval))
    assert set(first_round[first_round > 0].tolist()) == {micro_batch}
    assert loads_of(run).max() == peak
    gaps = np.diff(np.flatnonzero(starts))
    assert gaps.max() <= interval + 1  # No sequence waits for another to end.
    if is_short:
        together = Run("stall-free", replace(limits, kv_load_limit=None), jobs)
        together.to_the_end()
        assert loads_of(together).max() == peak_together


@pytest.mark.slow
def test_the_load_stays_even_for_unequal_lengths_and_prompts() -> None:
    """The mean load is close to the limit while requests last, and no step exceeds the limit."""
    rng = np.random.default_rng(1)
    jobs = []
    for prompt_len, length in rng.integers((5, 20), (80, 120), (600, 2)).tolist():
        jobs.append(Job([1] * prompt_len, length, [length]))
    limit = 3000
    run = Run("sls", replace(AMPLE, kv_load_limit=limit), jobs, recounts=SEES_ALL)
    run.to_the_end()
    loads = loads_of(run)[0]
    last_start = max(step for step, _ in run.starts)
    assert loads.max() <= limit
    assert loads[120:last_start].mean() >= 0.8 * limit
    assert loads[120:last_start].std() <= 0.12 * limit


def test_below_the_limit_nothing_is_staggered() -> None:
    """All sequences start in the first step, as without a limit, though the limit is only just enough."""
    jobs = [Job([1] * 10, 20, [20]) for _ in range(50)]
    for limit in (None, 50 * 29):
        run = Run("sls", replace(AMPLE, kv_load_limit=limit), jobs)
        run.to_the_end()
        assert {step for step, _ in run.starts} == {0}
    run = Run("sls", replace(AMPLE, kv_load_limit=50 * 29 - 1), jobs)
    run.to_the_end()
    assert len({step for step, _ in run.starts}) > 5


def test_a_found_limit_lets_everybody_start_who_has_a_seat() -> None:
    """With R time equal to S time all seats start at once, except where many generations of requests wait.

    The longest request fits whatever limit was found.
    """
    limits = replace(AMPLE, max_num_seqs=50, max_num_batched_tokens=2048)
    jobs = [Job([1] * 10, 20, [20]) for _ in range(50)]
    run = Run("sls", limits, jobs)
    run.scheduler.load_limit.balance_at(7)
    run.arrive_and_abort()
    assert run.scheduler.load_limit.tokens == 29
    run.step()
    assert len(run.starts) == 50
    for generations in (2, 12):
        crowd = Run("sls", limits, jobs * generations, recounts=SEES_ALL)
        crowd.scheduler.load_limit.balance_at(900)
        crowd.to_the_end()
        loads = loads_of(crowd)[0]
        if generations == 2:
            assert len([step for step, _ in crowd.starts if step == 0]) == 50
        else:
            last_start = max(step for step, _ in crowd.starts)
            assert 1 <= len([step for step, _ in crowd.starts if step == 0]) < 20
            assert loads[30 : last_start - 30].mean() == pytest.approx(900, rel=0.03)
            assert loads[: last_start - 30].max() <= 1.1 * 900


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_jobs", "shortest", "longest", "steps", "most"),
    [
        pytest.param(600, (20, 30), (120, 180), slice(100, 450), 0.85, marks=pytest.mark.thorough),
        pytest.param(900, (20, 60), (120, 360), slice(200, 1340), 0.75, marks=pytest.mark.thorough),
    ],
)
def test_prompts_come_evenly_while_all_seats_are_taken(
    num_jobs: int, shortest: tuple[int, int], longest: tuple[int, int], steps: slice, most: float
) -> None:
    """Rows per step vary less than where prompts are computed as they come, and are no fewer.

    Where R-workers are above their limit, prompts are computed at once.
    """
    rng = np.random.default_rng(1)
    lengths = rng.integers(shortest, longest, (num_jobs, 2)).tolist()
    jobs = [Job([1] * prompt, length, [length]) for prompt, length in lengths]
    spread, means = [], []
    for schedule, limit in (("sls", 1 << 20), ("sls", 1 << 12), ("stall-free", 1 << 20)):
        run = Run(schedule, replace(AMPLE, max_num_seqs=128), jobs, recounts=False)
        run.scheduler.load_limit.balance_at(limit)
        run.arrive_and_abort()
        rows = []
        while run.alive:
            rows.append(run.step().num_tokens)
            run.step_number += 1
        steady = rows[steps]
        spread.append(np.std(steady))
        means.append(np.mean(steady))
    assert spread[0] <= most * spread[2]
    assert spread[1] >= 0.95 * spread[2]
    assert means == pytest.approx([means[2]] * 3, rel=0.01)


def test_the_rows_of_a_step_by_hand() -> None:
    """Requests of 8 prompt rows and 32 decodes give 64 seats 80 rows on average; with an eighth free, no limit."""
    limit = LoadLimit(None, Workers([1, 1], [1.0, 3.0], Sizes(1)))
    control = LoadControl(limit)
    prompt = Newcomer(0, 8, 8, 32)
    control.started(prompt)
    quarter, full = np.array([25.0, 75.0]), np.array([25.0, 150.0])
    assert control.most_rows(quarter, 0.0, 64, 2048) == 2048
    limit.balance_at(50)
    assert limit.of_workers.tolist() == pytest.approx([25.0, 75.0])
    assert control.most_rows(quarter, 0.0, 64, 2048) == 80
    assert control.most_rows(full, 0.0, 64, 2048) == 160
    assert control.most_rows(quarter, 1 / 16, 64, 2048) == 80 + (2048 - 80) // 4
    assert control.most_rows(quarter, 1 / 8, 64, 2048) == 2048
    assert control.most_rows(quarter, 0.0, 64, 70) == 70
    strict = LoadControl(LoadLimit(100, Workers([1, 1], [1.0, 3.0], Sizes(1))))
    strict.started(prompt)
    assert strict.most_rows(quarter, 0.0, 64, 2048) == 2048


def test_outputs_shorter_than_expected_make_room_for_more() -> None:
    """max_tokens is 100 but outputs have 20 tokens, so many more run at a time once some have ended."""
    jobs = [Job([1], 100, [20]) for _ in range(300)]
    run = Run("sls", replace(AMPLE, kv_load_limit=400), jobs)
    run.to_the_end()
    loads = loads_of(run)[0]
    assert loads[:100].max() < 100 < 200 < loads[-100:-30].mean() <= loads.max() <= 400
    assert len(loads) < 600  # 300 outputs of 100 tokens would take 300 x 5050 / 400 steps.


def test_longer_outputs_than_expected_are_held_back_at_the_limit() -> None:
    """Short outputs come first, then long ones; the limit holds in every step (the harness checks it), and all end."""
    jobs = [Job([1], 200, [5]) for _ in range(60)] + [Job([1], 200, [150]) for _ in range(30)]
    run = Run("sls", replace(AMPLE, kv_load_limit=400), jobs)
    run.to_the_end()
    assert 300 < loads_of(run).max() <= 400


def test_load_is_shared_in_proportion_to_bandwidth() -> None:
    jobs = [Job([1] * 20, 60, [60]) for _ in range(200)]
    limits = replace(AMPLE, num_blocks=(9999, 9999), bandwidths=(2.0, 1.0), kv_load_limit=1500)
    run = Run("sls", limits, jobs, recounts=SEES_ALL)
    run.to_the_end()
    fast, slow = loads_of(run)[:, 60:300].mean(axis=1)
    assert fast / slow == pytest.approx(2.0, rel=0.1)


def test_expected_lengths() -> None:
    """The expected length is max_tokens until enough outputs have stopped by themselves.

    Then it follows these, where outputs that were cut say only 'at least'.
    """
    lengths = OutputLengths()
    now, most = np.array([1, 3, 8, 12]), np.array([50, 50, 9, 50])
    for _ in range(200):
        lengths.finished(6, was_cut=True)
    assert lengths.expected(now, most).tolist() == most.tolist()
    for _ in range(MIN_ENDED):
        lengths.finished(10, was_cut=False)
    found = lengths.expected(now, most)
    assert found.tolist() == [10, 10, 9, 50]
    for _ in range(MIN_ENDED):
        lengths.finished(20, was_cut=False)
    assert lengths.expected(np.array([1, 12, 10]), np.array([50, 50, 12])).tolist() == [15, 20, 12]


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=40, max_size=80), st.integers(1, 30))
def test_expected_lengths_are_possible(seen: list[tuple[int, bool]], now: int) -> None:
    lengths = OutputLengths()
    for length, was_cut in seen:
        lengths.finished(length, was_cut)
    most = np.arange(now, now + 40)
    found = lengths.expected(np.full(40, now), most)
    assert (found <= most).all() and (found[1:] > now).all()


def test_the_balance_is_found_from_the_first_decode_steps() -> None:
    """With R time of 2 ms + 1 µs per token, S time of 10 ms meets it at 8,000 tokens, whatever the loads were."""
    finder = BalanceFinder()
    rng = np.random.default_rng(0)
    for step in range(NUM_STEPS):
        loads = (1000 + 100 * step, 700)
        seconds = [0.002 + 1e-6 * load * rng.uniform(0.99, 1.01) for load in loads]
        found = finder.observe(64, loads, 0.010, seconds)
        assert (found is None) == (step < NUM_STEPS - 1)
    assert found == pytest.approx(8000, rel=0.1)
    assert finder.observe(127, (1,), 1.0, (1.0,)) is None
    assert finder.observe(128, (5, 5), 0.010, (0.0, 0.0)) is None
    again = [finder.observe(128, (4000,), 0.010, (0.004,)) for _ in range(NUM_STEPS)]
    assert again[:-1] == [None] * (NUM_STEPS - 1) and again[-1] == pytest.approx(10_000)


def test_the_token_budget_meets_its_target() -> None:
    """A step takes 10 ms up to 64 tokens, and 0.1 ms more for each further token."""
    profile = MeasuredStepTime([64, 128, 1024], [0.010, 0.0164, 0.106])
    assert profile(16, 0) == pytest.approx(0.010) and profile(2048, 0) == pytest.approx(0.2084)
    assert budget_within(0.050, profile, 8, 2048) == 448
    assert budget_within(9.0, profile, 8, 2000) == 1984
    assert budget_within(0.0101, profile, 40, 2048) == 64
    assert budget_within(0.012, profile, 70, 2048) == 70
    with pytest.raises(ConfigError, match=r"tbt_target: a step of 256 tokens.*takes 0.0292 s: give at least that"):
        budget_within(0.020, profile, 256, 2048)
