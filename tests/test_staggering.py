"""The rule that spreads starts where that pays, against a step-by-step count and for known cases."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.scheduler.policy.output_lengths import MIN_ENDED, Outlook, OutputLengths

NO_SEQUENCES = np.zeros(0, np.int64)


def outlook(sizes: list[tuple[int, int]], seats: int, limit: float, idle_share: float = 1.0) -> Outlook:
    prompts, steps = (np.array(column, np.int64) for column in zip(*sizes, strict=True))
    return Outlook(np.zeros(1), NO_SEQUENCES, prompts, steps, 1, seats, limit, idle_share)


def step_by_step(sizes: list[tuple[int, int]], seats: int, limit: float, idle_share: float, spread: bool) -> float:
    """Return the seconds of all steps.

    A sequence that starts attends its prompt and a token. Starts are in order, as seats and, with ``spread``, earlier
    starts allow.
    """
    running: list[list[int]] = []
    waiting, seconds, step, paid = list(sizes), 0.0, 0, 0.0
    while waiting or running:
        while waiting and len(running) < seats and (not spread or paid <= step * limit):
            prompt, steps = waiting.pop(0)
            running.append([prompt + 1, steps])
            paid += prompt * steps + steps * (steps + 1) / 2
        load = sum(tokens for tokens, _ in running)
        if running:
            share = idle_share + (1 - idle_share) * len(running) / seats
            seconds += max(share, load / limit)
        running = [[tokens + 1, left - 1] for tokens, left in running if left > 1]
        step += 1
        assert step < 100_000
    return seconds


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=25),
    st.integers(1, 6),
    st.integers(20, 300),
    st.sampled_from([0.25, 1.0]),
)
@settings(max_examples=examples(300))
def test_the_outlook_is_what_happens_step_by_step(
    sizes: list[tuple[int, int]], seats: int, limit: int, idle_share: float
) -> None:
    ahead = outlook(sizes, seats, limit, idle_share)
    for found, spread in ((ahead.together, False), (ahead.spread, True)):
        assert found == pytest.approx(step_by_step(sizes, seats, limit, idle_share, spread))


@pytest.mark.parametrize(("generations", "pays"), [(1, False), (2, False), (8, True), (16, True)])
def test_spreading_pays_for_many_generations(generations: int, pays: bool) -> None:
    """With R = S, waves take 1.25 generations each, and spread starts take one more than there are."""
    seats, length = 32, 64
    ahead = outlook([(1, length)] * (seats * generations), seats, seats * (1 + (length + 1) / 2))
    assert (ahead.spread < ahead.together) == pays
    assert ahead.together == pytest.approx(1.25 * generations * length, rel=0.03)
    assert ahead.spread == pytest.approx((generations + 1) * length, rel=0.05)


def test_the_first_to_end_do_not_make_all_others_look_as_short() -> None:
    """Sixteen of a hundred ended after 5 tokens, and the others run on."""
    lengths = OutputLengths()
    for _ in range(MIN_ENDED):
        lengths.finished(5, was_cut=False)
    now, most = np.array([1]), np.array([100])
    assert lengths.expected(now, most).tolist() == [5]
    lengths.running(np.full(84, 6))
    assert lengths.expected(now, most)[0] == pytest.approx(0.16 * 5 + 0.84 * 100, abs=2)
    drawn = lengths.drawn(np.ones(200, np.int64), np.full(200, 100))
    assert drawn.mean() == pytest.approx(0.16 * 5 + 0.84 * 100, abs=4) and set(drawn.tolist()) == {5, 100}
