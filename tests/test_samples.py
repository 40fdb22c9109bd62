"""What the calibrator makes of the times it takes, on a machine whose times are given."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from fastdecode.errors import ProfileError
from fastdecode.measure.samples import MOST_DISTURBED, s_samples


class TimedRig:
    """Steps that take the S-part the next of these seconds each time they are measured."""

    def __init__(self, s_seconds: Iterator[float]) -> None:
        self._s_seconds = s_seconds

    def decode(self, *_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(s_seconds=next(self._s_seconds), host_seconds=0.5)]


def test_a_disturbed_round_is_measured_again() -> None:
    """One layer takes 2 s and everything else 1 s, but once five layers took less than one."""
    few, many = TimedRig(iter([3.0, 30.0, 3.0])), TimedRig(iter([11.0, 11.0, 11.0]))
    rows = s_samples(few, many, batch_size=8, threads=1, rounds=2)  # type: ignore[arg-type]
    np.testing.assert_allclose(rows, [[2.0, 1.0, 0.5]] * 2)


def test_a_machine_that_is_always_disturbed_is_refused() -> None:
    """No profile is written with a layer that takes no time."""
    few, many = TimedRig(iter([5.0] * 99)), TimedRig(iter([5.0] * 99))
    with pytest.raises(ProfileError, match=f"batch size 8 took no longer than 1, {MOST_DISTURBED + 1} times"):
        s_samples(few, many, batch_size=8, threads=1, rounds=2)  # type: ignore[arg-type]
