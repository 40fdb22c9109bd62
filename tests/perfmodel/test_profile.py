"""Profiles are written as JSON and read back; missing, unknown or impossible values are refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from helpers.hardware import profile
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError, ProfileError
from fastdecode.perfmodel.calibration import fit_parts
from fastdecode.perfmodel.deployment import Deployment, Drift, deployed_step_model
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.measurements import PrefillPoint
from fastdecode.perfmodel.partition import PartitionEntry
from fastdecode.perfmodel.prefill_rates import (
    TILE_ROWS,
    measured_forecast,
    measured_prefill_model,
    measured_speeds,
    slowdown,
)
from fastdecode.perfmodel.prefill_times import triangle_pairs
from fastdecode.perfmodel.profile_json import read_profile, write_profile
from fastdecode.perfmodel.stages import Contention


def changed(**changes: Any) -> str:
    data = json.loads(write_profile(profile())) | changes
    return json.dumps({key: value for key, value in data.items() if value is not ...})


def test_round_trip() -> None:
    assert read_profile(write_profile(profile())) == profile()


def test_a_profile_of_version_1_knows_no_prefill_workers() -> None:
    """Version 1's files were written before prefill workers were measured."""
    old = read_profile(changed(format_version=1, prefill=..., partitions=...))
    assert old == dataclasses.replace(profile(), prefill=(), partitions=())
    with pytest.raises(ProfileError, match="no prefill workers"):
        measured_prefill_model(old)


def prefill_points(products: float, pair: float, once: float) -> tuple[PrefillPoint, ...]:
    """Return points of worker 0 alone and beside another (half as fast), and of worker 1 alone (a quarter faster)."""
    found = []
    for n in (512, 1024, 4096):
        seconds = products * n + pair * triangle_pairs(n, TILE_ROWS) + once
        found += [
            PrefillPoint(n, seconds),
            PrefillPoint(n, 0.8 * seconds, worker=1),
            PrefillPoint(n, 1.5 * seconds, num_busy=2),
        ]
    return tuple(found)


def test_rates_of_prefill_workers_are_found_again() -> None:
    parts = PartitionEntry(4096, (2500, 1596))
    found = dataclasses.replace(profile(), prefill=prefill_points(1e-3, 1e-7, 0.01), partitions=(parts,))
    assert read_profile(write_profile(found)) == found
    alone, beside = measured_prefill_model(found), measured_prefill_model(found, num_busy=2)
    assert alone.job_seconds == pytest.approx(0.01, rel=0.05)
    for n in (600, 3000):
        expected = 1e-3 * n + 1e-7 * triangle_pairs(n, TILE_ROWS)
        assert alone.alone_seconds(n) == pytest.approx(expected + 0.01, rel=0.01)
        assert beside.alone_seconds(n) == pytest.approx(1.5 * expected + 0.01, rel=0.01)
    half = dataclasses.replace(profile().shape, num_layers=profile().shape.num_layers // 2)
    assert measured_prefill_model(found, shape=half).alone_seconds(3000) < 0.55 * alone.alone_seconds(3000)
    assert measured_speeds(found) == pytest.approx((1.0, 1.25))
    assert slowdown(found, 5) == pytest.approx(1.5)
    assert measured_forecast(found, 2).parts(8192, (1.0, 1.0)) == (5000, 3192)


def test_what_a_plan_takes_from_it() -> None:
    """A plan takes points in any order, parts of a time by what they grow with, and the slowest link."""
    found = profile()
    assert found.measured_s_part().layer_seconds(1024) == 7.08e-3
    assert found.measured_s_part().layer_seconds(1) == 1.46e-3
    r_part = found.measured_r_part("float16")
    assert r_part.seconds_per_token == pytest.approx(1.239e-7)
    assert r_part.call_seconds == pytest.approx(2e-5) and r_part.row_seconds == 0
    way = found.transport(row_bytes=4.0)
    assert way.latency_seconds == pytest.approx(3e-5) and way.hop_bytes_per_second == pytest.approx((10e9,))
    assert found.transport("r0").hop_bytes_per_second == pytest.approx((12.5e9,))
    assert found.step_overhead_seconds("r0", 3) == pytest.approx((1e-3 + 3e-4, 1e-6))
    assert found.anchor_seconds("r", 32) == 6e-3


def test_other_kv_heads_take_as_long_as_they_have_parameters() -> None:
    found, shape = profile(), BUILT_IN["llama-7b"].with_kv_heads(8)
    fewer = shape.layer_parameters / BUILT_IN["llama-7b"].layer_parameters
    assert found.measured_s_part(shape=shape).layer_seconds(1) == pytest.approx(1.46e-3 * fewer)
    assert found.measured_s_part(shape=shape).head_seconds(1) == 1e-3


def test_what_it_lacks_is_named() -> None:
    found = profile()
    with pytest.raises(ProfileError, match="no R-part for int8 with 32 / 32 heads of 128; it has float16 with 32 / 32"):
        found.measured_r_part("int8")
    with pytest.raises(ProfileError, match=r"no R-part with 4 thread\(s\); it has 32"):
        found.measured_r_part("float16", 4)
    with pytest.raises(ProfileError, match=r"no S-part with 2 thread\(s\); it has 1"):
        found.measured_s_part(2)
    with pytest.raises(
        ProfileError, match=r"no anchor 's' with 2.*`fastdecode calibrate` without --quick measures every"
    ):
        found.anchor_seconds("s", 2)
    with pytest.raises(
        ProfileError, match=r"no S-part of 4 rank\(s\).*`fastdecode calibrate --tensor-parallel-size 4`"
    ):
        found.measured_s_part(num_ranks=4)


def test_a_deployment_by_hand() -> None:
    """Ten layers and 1,024 rows over 262,144 tokens: S takes 7.08 ms a layer and 1 ms of head, R takes 32.5 ms."""
    found, shape = profile(), dataclasses.replace(BUILT_IN["llama-7b"], num_layers=10)
    s_part, r_part, tokens = 7.08e-3, 1.239e-7 * 262_144 + 2e-5, 262_144
    host = 1e-3 + 1e-6 * 1024
    in_turn = deployed_step_model(found, shape, "float16", Deployment(1, 32))
    assert in_turn(1024, tokens) == pytest.approx(10 * (s_part + r_part) + 1e-3 + host)
    slower = deployed_step_model(found, shape, "float16", Deployment(1, 32), Drift(2.0, 3.0))
    assert slower(1024, tokens) == pytest.approx(10 * (2 * s_part + 3 * r_part) + 2e-3 + 2 * host)
    apart = deployed_step_model(found, shape, "float16", Deployment(1, 32, 1, 2, separate_cores=True))
    r_total, s_total = 2 * 10 * r_part, 2 * (10 * s_part + 1e-3) - (s_part + 1e-3)
    beside = 1.5 * s_total + r_total - 1.5 * s_total / 1.25  # The S-part ends first, and the R-part goes on alone.
    assert apart(2048, 2 * tokens) == pytest.approx(s_part + 1e-3 + beside + 1e-3 + 1e-6 * 2048)
    two = deployed_step_model(found, shape, "float16", Deployment(1, 32, 2, r_workers_per_core=2))
    assert two.stages(Load.decode(1024, tokens)).r_part == pytest.approx(r_part + 2e-5)


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.floats(1, 3), st.floats(1, 3))
def test_two_that_slow_each_other(s_seconds: float, r_seconds: float, s_slowdown: float, r_slowdown: float) -> None:
    """The formula agrees with a step-by-step run of both parts; slowdowns of 2 give the sum, of 1 the longer part."""
    contention = Contention(s_slowdown, r_slowdown)
    s_left, r_left, now, tick = s_seconds, r_seconds, 0.0, (s_seconds + r_seconds) / 2000
    while s_left > 0 or r_left > 0:
        both = s_left > 0 and r_left > 0
        s_left -= tick / (s_slowdown if both else 1.0)
        r_left -= tick / (r_slowdown if both else 1.0)
        now += tick
    assert contention.together(s_seconds, r_seconds) == pytest.approx(now, abs=4 * tick)
    assert Contention(2, 2).together(s_seconds, r_seconds) == pytest.approx(s_seconds + r_seconds)
    assert Contention().together(s_seconds, r_seconds) == pytest.approx(max(s_seconds, r_seconds))
    with pytest.raises(ConfigError, match="makes neither side faster"):
        Contention(0.9, 1.0)


@given(st.floats(1e-9, 1e-6), st.floats(0, 1e-4), st.floats(0, 1e-3), st.floats(0.97, 1.03), st.floats(0.97, 1.03))
def test_parts_are_found_again(token: float, row: float, call: float, up: float, down: float) -> None:
    """The parts are exact without noise, never negative with noise, and no further off than the noise."""
    columns = np.array(
        [(16 * 128, 16, 1), (128 * 128, 128, 1), (16 * 1024, 16, 1), (32 * 1024, 32, 1), (8 * 4096, 8, 1.0)]
    )
    exact = columns @ (token, row, call)
    assert columns @ fit_parts(columns, exact) == pytest.approx(exact, rel=0.1)
    noisy = exact * np.array([up, down, 1, down, up])
    weights = fit_parts(columns, noisy)
    assert np.all(weights >= 0) and weights[0] > 0
    assert fit_parts(columns[:1], exact[:1]).tolist() == pytest.approx([exact[0] / 2048, 0, 0])


def points(key: str, **change: Any) -> list[dict[str, Any]]:
    """Return the profile's list of points named ``key``, with the first point changed."""
    first, *others = json.loads(write_profile(profile()))[key]
    return [first | change, *others]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        (changed(format_version=4), "format_version is 4, and this version reads 1, 2 and 3"),
        (changed(prefill=[{"num_tokens": 0, "seconds": 1.0}]), r"prefill\[0\] cannot be right: num_tokens"),
        (changed(prefill=[{"num_tokens": 9, "seconds": 0}]), r"prefill\[0\] cannot be right: seconds must be above 0"),
        (changed(partitions=[{"num_tokens": 9, "parts": 9}]), r"partitions\[0\].parts must be a list"),
        (changed(partitions=[{"num_tokens": 9, "parts": [4, "5"]}]), r"partitions\[0\].parts\[1\] must be of type int"),
        (changed(partitions=[{"num_tokens": 9, "parts": [4, 4]}]), "must be at least 1 and add up"),
        (changed(partitions=2 * [{"num_tokens": 9, "parts": [4, 5]}]), "9 tokens on 2 workers twice"),
        (changed(machine=...), "machine must be a JSON object"),
        (changed(colour="red"), "unknown key colour"),
        (changed(s_part=[{"batch_size": 1, "layer_seconds": 1.0}]), r"s_part\[0\]: lacks head_seconds"),
        (changed(s_part=[]), "batch sizes"),
        (changed(s_part={}), "s_part must be a list"),
        (changed(host=[{"num_sequences": 1, "seconds": -1}]), r"host\[0\].seconds must be a finite number"),
        (changed(host=[{"num_sequences": 1, "seconds": "1"}]), "must be of type float"),
        (changed(r_part=points("r_part", seconds=0)), r"r_part\[0\] cannot be right: seconds must be above 0, not 0"),
        (changed(anchors=points("anchors", seconds=0.0)), r"anchors\[0\] cannot be right: seconds must be above 0"),
        (changed(shape=json.loads(write_profile(profile()))["shape"] | {"num_layers": 0}), "num_layers must be"),
    ],
)
def test_bad_profiles(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read_profile(text)
