"""Timing beside an anchor, on machines with invented speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fastdecode.perfmodel.calibration import Anchor, steadily, summary


def answers(*seconds: float) -> Callable[[], float]:
    """Return a function that returns ``seconds`` one after another."""
    each: Iterator[float] = iter(seconds)
    return lambda: next(each)


def test_a_slow_minute_is_scaled_away() -> None:
    """The machine is half as fast as at the reference, and so is the measurement."""
    anchor = Anchor.of(answers(1.0, 3.0, 1.0, 2.0, 2.0))
    (found,) = steadily([anchor], lambda: np.array([[10.0, 1.0], [12.0, 3.0], [11.0, 2.0]]))
    assert (found.drift, found.moved, found.tries) == (2.0, 0.0, 1)
    assert found.measured(0).seconds == 5.5 and found.measured(1).seconds == 1.0


def test_what_moved_is_taken_again_and_the_steadiest_counts() -> None:
    samples = answers(1.0, 2.0, 3.0)
    anchor = Anchor(answers(1.0, 1.2, 1.3, 2.6), 1.0)
    (found,) = steadily([anchor], lambda: np.array([[samples()]]), most_tries=3)
    assert found.samples.item() == 2.0 and found.drift == pytest.approx(1.25)
    assert found.moved == pytest.approx(1.3 / 1.2 - 1) and found.tries == 3


def test_one_steady_anchor_is_not_enough() -> None:
    """Both anchors must be steady; once they are, nothing is repeated."""
    samples = answers(1.0, 2.0)
    moving, still = Anchor(answers(1.0, 1.2, 1.2), 1.0), Anchor(answers(4.0, 4.0, 4.0), 2.0)
    first, second = steadily([moving, still], lambda: np.array([[samples()]]))
    assert first.samples.item() == second.samples.item() == 2.0
    assert (first.drift, second.drift, second.tries) == (1.2, 2.0, 2)


def test_spread_is_of_the_middle_of_the_samples() -> None:
    found = summary(np.arange(101.0))
    assert (found.seconds, found.spread) == (50.0, pytest.approx(80 / 50))
