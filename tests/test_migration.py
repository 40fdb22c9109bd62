"""Sequences that move when the load is uneven, against every possible single move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import model_zoo
from helpers.engine_checks import assert_nothing_held
from helpers.examples import examples, thinned
from helpers.scheduler_harness import AMPLE, Job, Run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastdecode import LLM, SamplingParams
from fastdecode.core.step import ScheduledStep
from fastdecode.scheduler import Scheduler, Transfer
from fastdecode.scheduler.policy.move_prices import MOST_STEPS, SHARE, SharedPeak, attended_in
from fastdecode.scheduler.policy.moves import COOL_DOWN
from fastdecode.scheduler.transfers import Transfers

pytestmark = pytest.mark.slow

PER_TOKEN = 1e-3


def shared(times: np.ndarray, hidden: float) -> float:
    """Return Σ of the i-th busiest R-worker's time over i; ``times``: [num_workers, steps].

    It falls by an R-worker's part of a step as that R-worker gets less. It is Hart and Mas-Colell's potential of the
    game that SharedPeak plays.
    """
    falling = np.sort(np.maximum(times, hidden), axis=0)[::-1]
    return float((falling / np.arange(1, len(falling) + 1)[:, None]).sum())


@st.composite
def fleets(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw loads [num_workers, steps], some of them equal, and seconds per token [num_workers]."""
    num_workers, num_steps = draw(st.integers(2, 5)), draw(st.integers(1, 15))
    row = st.lists(st.integers(0, 9), min_size=num_steps, max_size=num_steps)
    loads = np.array(draw(st.lists(row, min_size=num_workers, max_size=num_workers)), float) * 10
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=num_workers, max_size=num_workers))
    return loads, np.array(speeds)


@given(fleets(), st.integers(0, 1), st.integers(1, 60), st.integers(1, 20), st.sampled_from([0.0, 40.0, 120.0]))
@settings(max_examples=examples(300))
def test_a_gain_is_what_is_shared_less(
    fleet: tuple[np.ndarray, np.ndarray], source: int, attended: int, left: int, hidden: float
) -> None:
    """The gain equals the fall from before to after the move, step by step.

    Any R-worker may overtake another, above ``hidden`` or below.
    """
    loads, per_token = fleet
    steps = np.arange(loads.shape[1])
    moving = np.where(steps < left, attended + steps, 0)
    targets = np.flatnonzero(np.arange(len(loads)) != source)
    peak = SharedPeak(loads, per_token, hidden)
    tokens = attended_in(peak.steps, np.array([float(attended)]), np.array([left]))
    (found,) = peak.gains(source, tokens, targets)
    for target, gain in zip(targets, found, strict=True):
        after = loads.copy()
        after[source] -= moving
        after[target] += moving
        before = shared(loads * per_token[:, None], hidden)
        assert gain == pytest.approx(before - shared(after * per_token[:, None], hidden), abs=1e-6)


def uneven_run(sizes: list[tuple[int, int]], slowness: tuple[float, ...], price: float = 0.0) -> Run:
    """Return a run of decoding jobs (prompt, output), on R-workers whose speed was not known before."""
    num_workers = len(slowness)
    limits = replace(
        AMPLE, num_blocks=(9999,) * num_workers, bandwidths=(1.0,) * num_workers, max_num_batched_tokens=10**6,
        seconds_per_moved_token=price,
    )  # fmt: skip
    jobs = [Job([1] * prompt_len, output_len, [output_len]) for prompt_len, output_len in sizes]
    run = Run("stall-free", limits, jobs)
    run.arrive_and_abort()
    run.step()
    run.seconds_per_token = tuple(PER_TOKEN * slow for slow in slowness)
    return run


def times_ahead(run: Run, sequence_id: int = -1, target: int = -1) -> np.ndarray:
    """Return each R-worker's seconds in each step to the end, with one sequence on ``target``: [workers, steps].

    The speeds are those that the scheduler has seen by then, which other tests compare with the true ones.
    """
    prices, num_steps = run.scheduler.transfers.moves.prices, 20
    per_token = prices.seconds_per_token * run.scheduler.store.workers.speeds.relative_times
    loads = np.zeros((len(per_token), num_steps))
    for member in run.alive.values():
        worker = target if member.sequence_id == sequence_id else member.worker
        for step in range(member.max_tokens - len(member.output_token_ids)):
            loads[worker, step] += member.num_tokens + step
    return loads * per_token[:, None]


def net_gain(run: Run, sequence_id: int, target: int) -> float:
    """Return the gain of one move by trial, less twice its price."""
    hidden = run.scheduler.transfers.moves.prices.hidden
    price = 2 * run.limits.seconds_per_moved_token * run.alive[sequence_id].num_tokens
    return shared(times_ahead(run), hidden) - shared(times_ahead(run, sequence_id, target), hidden) - price


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(6, 15)), min_size=2, max_size=8),
    st.lists(st.sampled_from([1.0, 2.0, 6.0]), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.01, 0.05]),
)
@example([(1, 6), (31, 6)], [6.0, 1.0], 0.0)  # Emptying the slow R-worker, which is not busier, would win.
@settings(max_examples=examples(150), deadline=None)
def test_the_best_single_move_by_trial(sizes: list[tuple[int, int]], slowness: list[float], price: float) -> None:
    """The chosen move is worth as much as the best of all sequences and targets, or none is worth its price.

    Only an R-worker that is busier than the mean in some step gives sequences up; otherwise a slow one would be
    emptied.
    """
    run = uneven_run(sizes, tuple(slowness), price)
    for _ in range(3):
        run.step()
    prices = run.scheduler.transfers.moves.prices
    workers, times = range(len(slowness)), times_ahead(run)
    busier = (times > np.maximum(1.001 * times.mean(axis=0), prices.hidden)).any(axis=1)
    giving = [(i, m.worker) for i, m in run.alive.items() if busier[m.worker]]
    trials = [net_gain(run, i, v) for i, worker in giving for v in workers if v != worker]
    may, move = prices.may_pay, run.scheduler.transfers.begin_next()
    if move is None:
        assert not may or max(trials, default=0.0) <= 1e-6
    else:
        assert net_gain(run, move.sequence.sequence_id, move.target) == pytest.approx(max(trials), rel=1e-6)


def long_run(
    slowness: tuple[float, ...], price: float, noise: float = 0.0
) -> tuple[Run, list[tuple[int, Transfer]], float]:
    """Run a hundred unequal jobs, a few at a time; return the run, its moves by step, and the steps' seconds."""
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(5, 60)), int(rng.integers(100, 300))) for _ in range(100)]
    run = uneven_run(sizes, slowness, price)
    run.recounts = False
    moves: list[tuple[int, Transfer]] = []
    seconds, slow = 0.0, np.array(run.seconds_per_token)
    while run.alive:
        run.seconds_per_token = tuple(slow * rng.uniform(1 - noise, 1 + noise, len(slow)))
        run.step()
        step_seconds = float((np.array(run.kv_loads[-1]) * run.seconds_per_token).max())
        seconds += step_seconds
        move = run.scheduler.transfers.begin_next() if run.alive else None
        if move:
            taken = price * move.num_tokens
            assert taken <= 2 * MOST_STEPS * step_seconds, "decodes wait too long"
            moves.append((run.step_number, move))
            run.scheduler.transfers.done(move, taken)
        run.step_number += 1
    return moves, seconds


@pytest.mark.parametrize("price", thinned([0.0, 0.01], 2))
def test_moves_keep_their_share_and_nobody_moves_twice_at_once(price: float) -> None:
    """One R-worker takes thrice as long as expected, and all times jitter."""
    moves, seconds = long_run((3.0, 1.0, 1.0), price, noise=0.2)
    assert len(moves) > 3
    spent = [price * move.num_tokens for _, move in moves]
    assert sum(spent[:-1]) <= SHARE * seconds
    for sequence_id in {move.sequence.sequence_id for _, move in moves}:
        steps = [step for step, move in moves if move.sequence.sequence_id == sequence_id]
        assert (np.diff(steps) >= COOL_DOWN).all()


def test_what_is_even_stays() -> None:
    """Equal jobs run on R-workers as fast as expected, except for jitter."""
    run = uneven_run([(20, 100)] * 12, (1.0, 1.0, 1.0), 1e-3)
    rng = np.random.default_rng(1)
    for _ in range(90):
        run.seconds_per_token = tuple(PER_TOKEN * rng.uniform(0.95, 1.05, 3))
        run.step()
        assert run.scheduler.transfers.begin_next() is None


def test_a_slow_r_worker_gives_up_what_it_cannot_keep_up_with() -> None:
    """An R-worker three times as slow keeps 3 of its 8 of 24 equal sequences, and steps are nearly even again."""
    run = uneven_run([(40, 160)] * 24, (3.0, 1.0, 1.0), 1e-5)
    uneven = []
    for _ in range(120):
        run.step()
        run.move(1)
        times = np.array(run.kv_loads[-1]) * run.seconds_per_token
        uneven.append(times.max() / times.mean())
    assert uneven[0] > 1.7 and max(uneven[20:]) < 1.15
    assert run.num_moves < 7


@pytest.mark.parametrize("schedule", ["sls", pytest.param("fcfs", marks=pytest.mark.thorough)])
def test_real_caches_move_and_the_tokens_stay(tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three R-workers is given a fifth of the others' speed."""
    observe, done, moves = Scheduler.observe, Transfers.done, []

    def slow_first(self: Scheduler, step: ScheduledStep, *seconds: Any) -> None:
        busy = np.array(step.kv_loads) * [5e-3, 1e-3, 1e-3]
        observe(self, step, 1e-3, float(busy.max()), busy.tolist())

    def noted(self: Transfers, move: Transfer, seconds: float) -> None:
        assert seconds > 0
        moves.append((move.sequence.worker, move.target))
        done(self, move, seconds)

    monkeypatch.setattr(Scheduler, "observe", slow_first)
    monkeypatch.setattr(Transfers, "done", noted)
    folder = model_zoo.save_model("llama-gqa", tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    with LLM(
        str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=300, s_threads=1, r_threads=1,
        kv_cache_memory="64MiB", r_workers="inproc:3", schedule=schedule, kv_load_limit=10_000,
    ) as llm:  # fmt: skip
        outputs = llm.generate(model_zoo.prompts("llama-gqa") * 3, greedy, use_tqdm=False)
        assert_nothing_held(llm.engine)
    wanted = [list(tokens) for tokens in model_zoo.reference("llama-gqa").tokens] * 3
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    sources, targets = zip(*moves, strict=True)
    assert sources.count(0) > targets.count(0)
