"""The calibrator's figures from times that are given, not measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from fastdecode.core.errors import ProfileError
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig
from fastdecode.perfmodel.lab.measure.samples import FEW_LAYERS, MANY_LAYERS, MOST_DISTURBED, s_samples


def rig(s_seconds: Iterable[float], host_seconds: float = 0.5) -> DecodeRig:
    """Return a rig whose S-part takes the next of these seconds each time it is measured."""
    times = iter(s_seconds)

    def steps(*_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(s_seconds=next(times), host_seconds=host_seconds)]

    return cast(DecodeRig, SimpleNamespace(decode=steps))


def test_a_layers_time_is_what_it_adds() -> None:
    """The S-part takes 5 ms and 2 ms per layer, and the host's time is that of the larger model."""
    few, many = (rig(repeat(5e-3 + 2e-3 * n), 1e-4 * n) for n in (FEW_LAYERS, MANY_LAYERS))
    found = s_samples(few, many, 16, 1, rounds=5)
    np.testing.assert_allclose(found, [[2e-3, 5e-3, 1e-4 * MANY_LAYERS]] * 5)


def test_a_disturbed_round_is_measured_again() -> None:
    """A layer takes 2 s and all else 1 s, but in one round five layers took less than one."""
    few, many = rig([3.0, 30.0, 3.0]), rig([11.0, 11.0, 11.0])
    rows = s_samples(few, many, batch_size=8, threads=1, rounds=2)
    np.testing.assert_allclose(rows, [[2.0, 1.0, 0.5]] * 2)


def test_a_machine_that_is_always_disturbed_is_refused() -> None:
    """No profile is written in which a layer takes no time."""
    with pytest.raises(ProfileError, match=f"batch size 8 took no longer than 1, {MOST_DISTURBED + 1} times"):
        s_samples(rig(repeat(5.0)), rig(repeat(5.0)), batch_size=8, threads=1, rounds=2)
