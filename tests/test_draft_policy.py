"""The number of verified drafts, against every possible choice and on a machine of known times."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.scheduler.policy.draft_costs import RowCost
from fastdecode.scheduler.policy.draft_policy import FIRST_STEPS, LEAST_GAIN, PRIOR, BalancedDrafts

CHANCES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4)
LOADS = np.array([1000.0])


@dataclass
class Affine:
    """A ``StepTime`` of S and R by rows, of which the longer counts."""

    s_part: tuple[float, float]
    r_part: tuple[float, float]

    def __call__(self, tokens: int, kv_tokens: int) -> float:
        return max(fixed + per_row * tokens for fixed, per_row in (self.s_part, self.r_part))


TIMES = st.builds(Affine, *[st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 0.5)) for _ in range(2)])


def tokens_per_second(step_time: Affine, chances: list[float], counts: tuple[int, ...]) -> float:
    more = sum(chance**depth for chance, k in zip(chances, counts, strict=True) for depth in range(1, k + 1))
    return (len(chances) + more) / step_time(len(chances) + sum(counts), 1000)


@settings(max_examples=examples(150), deadline=None)
@given(CHANCES, st.lists(st.integers(0, 3), min_size=4, max_size=4), TIMES)
def test_no_other_choice_gives_more_tokens_per_second(chances: list[float], limits: list[int], times: Affine) -> None:
    most = limits[: len(chances)]
    chosen = BalancedDrafts(3, 2, times).choose(np.array(chances), np.array(most), len(chances), LOADS)
    assert chosen.dtype == np.int64
    assert np.all((chosen >= 0) & (chosen <= most))
    every = itertools.product(*(range(limit + 1) for limit in most))
    best = max(tokens_per_second(times, chances, counts) for counts in every)
    none = tokens_per_second(times, chances, (0,) * len(chances))
    found = tokens_per_second(times, chances, tuple(chosen.tolist()))
    assert found >= best * (1 - 4e-3) or (not chosen.any() and best < (1 + 1.1 * LEAST_GAIN) * none)


@settings(max_examples=examples(50), deadline=None)
@given(CHANCES, st.floats(0.0, 0.5))
def test_nothing_is_drafted_where_rows_cost_what_they_bring(chances: list[float], r_seconds: float) -> None:
    chances = [min(chance, 0.98) for chance in chances]
    times = Affine((0.0, 1.0), (r_seconds, 0.0))
    assert (
        not BalancedDrafts(3, 2, times).choose(np.array(chances), np.full(len(chances), 3), len(chances), LOADS).any()
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=40), TIMES)
def test_who_is_accepted_more_often_gets_no_fewer(chances: list[float], times: Affine) -> None:
    ascending = np.sort(np.array(chances).round(3))
    chosen = BalancedDrafts(4, 2, times).choose(ascending, np.full(len(chances), 4), len(chances), LOADS)
    unequal = np.flatnonzero(np.diff(ascending) > 0)
    assert all(chosen[place] <= chosen[place + 1 :].min() for place in unequal)


def test_many_sequences_share_as_few_do() -> None:
    """Drafts of thousands of candidates, of which only some numbers are compared first, go to the likeliest."""
    times = Affine((0.1, 0.001), (2.0, 0.0))  # The S-part takes as long as the R-part with 1,900 rows.
    rng = np.random.default_rng(0)
    chances = rng.uniform(0.3, 0.95, 1024)
    chosen = BalancedDrafts(8, 2, times).choose(chances, np.full(1024, 8), 1024, LOADS)
    assert 800 <= chosen.sum() <= 950
    gains = np.sort((chances[:, None] ** np.arange(1, 9)).ravel())[::-1]
    assert np.sum([np.sum(chances**depth * (chosen >= depth)) for depth in range(1, 9)]) == pytest.approx(
        gains[: chosen.sum()].sum(), rel=1e-4
    )


def test_drafting_time_counts() -> None:
    times = Affine((0.1, 0.0), (1.0, 0.0))
    for seconds, expected in ((0.0, 4), (0.1, 4), (0.5, 2), (2.0, 0)):
        policy = BalancedDrafts(4, 2, times)
        for _ in range(8):
            policy.observe_drafting(16, 4, 4 * seconds)
        chosen = policy.choose(np.full(16, 0.8), np.full(16, 4), 16, LOADS)
        assert (chosen == expected).all(), seconds


def test_row_costs_are_found_through_noise_and_drift() -> None:
    cost, rng = RowCost(prior=1.0, beyond=1.0), np.random.default_rng(0)
    for step in range(400):
        rows = 64 if step % 8 else 192
        slower = 1.0 + step / 400  # Steps become twice as slow in the end, as on a machine with other users.
        seconds = slower * (0.01 + 1e-4 * rows) * rng.normal(1.0, 0.05)
        cost.observe(rows, seconds * (5.0 if step % 97 == 96 else 1.0))  # Every 97th step has a pause.
    small, large = cost.at(np.array([64.0, 192.0]))
    assert small == pytest.approx(2 * 0.0164, rel=0.1)
    assert large == pytest.approx(2 * 0.0292, rel=0.1)


def test_row_costs_stay_within_what_can_be() -> None:
    """Costs never fall with rows, never rise faster than in proportion, and are proportional beyond what was seen."""
    cost, rng = RowCost(prior=1.0, beyond=1.0), np.random.default_rng(1)
    for _ in range(300):
        cost.observe(int(rng.integers(1, 300)), float(rng.lognormal(0.0, 1.0)))
        values = cost.at(np.array([1.0, 10.0, 100.0, 300.0, 600.0]))
        assert np.all(np.diff(values) >= 0) and np.all(values >= 0)
        assert values[-1] >= 1.9 * values[-2]


@dataclass
class Live:
    """Decoding sequences on a machine with S = s0 + s1 · rows and R by KV tokens and rows, mostly overlapped."""

    s0: float
    s1: float
    r_seconds: float
    r_per_row: float
    chances: np.ndarray
    noise: float = 0.03

    def run(self, num_steps: int, seed: int = 0, most: int = 4) -> float:
        """Return tokens per second relative to those without drafts."""
        policy, rng = BalancedDrafts(most, 2), np.random.default_rng(seed)
        num = len(self.chances)
        tried, kept, tokens, seconds, without = np.zeros(num), np.zeros(num), 0.0, 0.0, 0.0
        for _ in range(num_steps):
            chosen = policy.choose(policy.acceptance(tried, kept), np.full(num, most), num, np.array([1e5]))
            rows = num + int(chosen.sum())
            runs = np.cumprod(rng.random((num, most)) < self.chances[:, None], axis=1).sum(axis=1)
            accepted = np.minimum(runs, chosen)
            tried = np.where(chosen, 0.9 * tried + np.minimum(accepted + 1, chosen), tried)
            kept = np.where(chosen, 0.9 * kept + accepted, kept)
            s_part, r_part = self._times(rows) * rng.normal(1.0, self.noise, 2)
            wall = s_part + r_part - 0.9 * min(s_part, r_part)
            policy.observe(rows, num, [100_000], s_part, wall - s_part, [r_part])
            usual = self._times(num)
            tokens, seconds = tokens + num + accepted.sum(), seconds + wall
            without += usual.sum() - 0.9 * usual.min()
        return tokens / seconds / (num * num_steps / without)

    def _times(self, rows: int) -> np.ndarray:
        return np.array([self.s0 + self.s1 * rows, self.r_seconds + self.r_per_row * rows])


def test_where_r_workers_are_the_bottleneck_drafts_win_what_they_can() -> None:
    """The S-part may triple: with 3 drafts each, 1 + 0.6 + 0.36 + 0.22 tokens take little longer than one."""
    assert Live(0.005, 0.015 / 64, 0.06, 5e-5, np.full(64, 0.6)).run(500) > 1.6
    assert Live(0.0, 0.02 / 64, 0.06, 5e-5, np.full(64, 0.6)).run(500) > 1.4
    assert Live(0.0, 0.02 / 64, 0.06, 5e-5, np.linspace(0.0, 0.95, 64)).run(500) > 1.4


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8])
def test_where_the_s_worker_is_the_bottleneck_drafts_cost_nothing(chance: float) -> None:
    assert Live(0.0, 0.06 / 64, 0.02, 5e-5, np.full(64, chance)).run(500) > 0.98


def test_what_is_never_accepted_costs_little() -> None:
    assert Live(0.0, 0.02 / 64, 0.06, 5e-5, np.zeros(64)).run(500) > 0.97
    assert Live(0.0, 0.02 / 64, 0.02, 5e-5, np.zeros(64)).run(500) > 0.97
    assert Live(0.02, 0.0005, 0.001, 0.0, np.zeros(1)).run(500) > 0.97


def test_rows_that_are_free_on_the_s_side_are_used() -> None:
    """A lone sequence's S-part reads the weights, which takes as long for one row as for five."""
    assert Live(0.02, 0.0002, 0.001, 0.0, np.full(1, 0.8)).run(500) > 2.0


def test_a_sequence_whose_drafts_were_rejected_is_tried_again() -> None:
    """Text may begin to repeat, as an answer that quotes its prompt does."""
    policy = BalancedDrafts(4, 2, Affine((0.1, 0.001), (1.0, 0.0)))
    tried, kept = np.full(8, 10.0), np.zeros(8)
    some = [policy.choose(np.where(kept > 0, 0.5, 0.001), np.full(8, 4), 8, LOADS).any() for _ in range(200)]
    assert 2 <= sum(some) <= 20
    assert policy.acceptance(tried, kept).max() < 0.2
    assert policy.acceptance(np.zeros(3), np.zeros(3)).tolist() == pytest.approx([PRIOR] * 3)


def test_nothing_is_drafted_before_some_steps_were_seen() -> None:
    policy = BalancedDrafts(4, 1)
    for _ in range(FIRST_STEPS - 1):
        assert not policy.choose(np.full(4, 1.0), np.full(4, 4), 4, LOADS).any()
        policy.observe(4, 4, [1000], 0.1, 1.0, [1.0])
    policy.observe(4, 4, [1000], 0.1, 1.0, [1.0])
    assert policy.choose(np.full(4, 1.0), np.full(4, 4), 4, LOADS).all()
    assert policy.choose(np.zeros(0), np.zeros(0, np.int64), 0, LOADS).shape == (0,)
