"""Decaying sums against sums over all observations."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode.scheduler.places.speeds import Decayed


def test_sums_are_weighted_by_age() -> None:
    values = np.random.default_rng(0).random((30, 2))
    decayed = Decayed(0.8, 2)
    for pair in values.tolist():
        decayed.add(*pair)
    weights = 0.8 ** np.arange(29, -1, -1)
    assert decayed.sums == pytest.approx(weights @ values)
    assert decayed.ratio(0, 1) == pytest.approx((weights @ values[:, 0]) / (weights @ values[:, 1]))
    assert Decayed(0.8, 2).ratio(0, 1, 2.0) == 0.0


def test_things_age_only_when_they_are_observed() -> None:
    """Three things age only when observed; one comes late, and one is forgotten."""
    decayed = Decayed(0.5, 2, 2)
    decayed.add([1.0, 2.0], [3.0, 4.0], where=np.array([True, False]))
    decayed.add([1.0, 2.0], [3.0, 4.0], where=np.array([True, True]))
    assert decayed.sums.tolist() == [[1.5, 2.0], [4.5, 4.0]]
    decayed.resize(3)
    decayed.forget(1)
    decayed.add([0.0, 0.0, 8.0], [0.0, 0.0, 9.0], where=np.array([False, False, True]))
    assert decayed.sums.tolist() == [[1.5, 0.0, 8.0], [4.5, 0.0, 9.0]]
