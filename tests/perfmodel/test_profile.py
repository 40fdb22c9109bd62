"""Profiles go to JSON and back, and refuse what is missing, unknown or impossible."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.errors import ConfigError, ProfileError
from fastdecode.perfmodel.calibration import fit_parts
from fastdecode.perfmodel.deployment import Deployment, Drift, deployed_step_model
from fastdecode.perfmodel.model_shape import BUILT_IN
from fastdecode.perfmodel.profile import (
    AnchorPoint,
    ContentionPoint,
    HardwareProfile,
    HostPoint,
    LinkPoint,
    MachineIdentity,
    PlanPoint,
    RPartPoint,
    SPartPoint,
)
from fastdecode.perfmodel.profile_json import read_profile, write_profile
from fastdecode.perfmodel.stages import Contention


def r_point(sequences: int, context: int, seconds: float, **other: Any) -> RPartPoint:
    heads = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "threads": 32}
    return RPartPoint("float16", num_sequences=sequences, context_len=context, seconds=seconds, **heads | other)


def profile() -> HardwareProfile:
    """The paper's machine, as calibrate would write it: 0.1239 µs per token and 20 µs per call."""
    return HardwareProfile(
        machine=MachineIdentity("cluster", "NVIDIA A10", "Epyc 7452", "avx2", "0.1.0"),
        shape=BUILT_IN["llama-7b"],
        s_part=(SPartPoint(1024, 7.08e-3, 1e-3, 0.02), SPartPoint(1, 1.46e-3, 1e-3)),
        r_part=(
            r_point(1024, 256, 1.239e-7 * 1024 * 256 + 2e-5),
            r_point(16, 4096, 1.239e-7 * 16 * 4096 + 2e-5),
            r_point(16, 128, 1.239e-7 * 16 * 128 + 2e-5),
        ),
        links=(
            LinkPoint("r0", 1_000_000, 2e-5 + 1e6 / 12.5e9),
            LinkPoint("r0", 10_000_000, 2e-5 + 1e7 / 12.5e9),
            LinkPoint("r1", 1_000_000, 3e-5 + 1e6 / 10e9),
            LinkPoint("r1", 10_000_000, 3e-5 + 1e7 / 10e9),
        ),
        host=(HostPoint(1, 1.001e-3), HostPoint(1000, 2e-3)),
        plans=(PlanPoint("r0", 10, 1e-4), PlanPoint("r0", 1000, 1e-4)),
        contention=(ContentionPoint(1, 1, 1.5, 1.25),),
        anchors=(AnchorPoint("s", 1, 5e-3), AnchorPoint("r", 32, 6e-3)),
    )


def changed(**changes: Any) -> str:
    data = json.loads(write_profile(profile())) | changes
    return json.dumps({key: value for key, value in data.items() if value is not ...})


def test_round_trip() -> None:
    assert read_profile(write_profile(profile())) == profile()


def test_what_a_plan_takes_from_it() -> None:
    """Points in any order; parts of a time by what it grows with; the slowest link."""
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
    with pytest.raises(ProfileError, match="no anchor 's' with 2"):
        found.anchor_seconds("s", 2)


def test_a_deployment_by_hand() -> None:
    """Ten layers, 1,024 rows over 262,144 tokens: S 7.08 ms a layer and 1 ms of head, R 32.5 ms."""
    found, shape = profile(), dataclasses.replace(BUILT_IN["llama-7b"], num_layers=10)
    s_part, r_part, tokens = 7.08e-3, 1.239e-7 * 262_144 + 2e-5, 262_144
    host = 1e-3 + 1e-6 * 1024
    in_turn = deployed_step_model(found, shape, "float16", Deployment(1, 32))
    assert in_turn(1024, tokens) == pytest.approx(10 * (s_part + r_part) + 1e-3 + host)
    slower = deployed_step_model(found, shape, "float16", Deployment(1, 32), Drift(2.0, 3.0))
    assert slower(1024, tokens) == pytest.approx(10 * (2 * s_part + 3 * r_part) + 2e-3 + 2 * host)
    apart = deployed_step_model(found, shape, "float16", Deployment(1, 32, 1, 2, separate_cores=True))
    r_total, s_total = 2 * 10 * r_part, 2 * (10 * s_part + 1e-3) - (s_part + 1e-3)
    beside = 1.5 * s_total + r_total - 1.5 * s_total / 1.25  # S is done first, and R goes on alone
    assert apart(2048, 2 * tokens) == pytest.approx(s_part + 1e-3 + beside + 1e-3 + 1e-6 * 2048)
    two = deployed_step_model(found, shape, "float16", Deployment(1, 32, 2, r_workers_per_core=2))
    assert two.stages(1024, tokens).r_part == pytest.approx(r_part + 2e-5)


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.floats(1, 3), st.floats(1, 3))
def test_two_that_slow_each_other(s_seconds: float, r_seconds: float, s_slowdown: float, r_slowdown: float) -> None:
    """Against a step-by-step run of both; with 2 and 2 it is the sum, with 1 and 1 the longer."""
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
    """Exactly without noise, never negative with it, and then no further off than the noise."""
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
    """A list of the profile's points, the first of them changed."""
    first, *others = json.loads(write_profile(profile()))[key]
    return [first | change, *others]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        (changed(format_version=2), "format_version is 2, and this version reads 1"),
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
