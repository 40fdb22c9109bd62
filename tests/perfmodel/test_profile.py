"""Profiles go to JSON and back, and refuse what is missing, unknown or impossible."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastdecode.errors import ProfileError
from fastdecode.perfmodel.model_config import BUILT_IN
from fastdecode.perfmodel.profile import (
    HardwareProfile,
    LinkPoint,
    MachineIdentity,
    RPartPoint,
    SPartPoint,
    read_profile,
)


def profile() -> HardwareProfile:
    """The paper's machine, as calibrate would write it."""
    heads = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "threads": 32}
    return HardwareProfile(
        machine=MachineIdentity("cluster", "NVIDIA A10", "Epyc 7452", "avx2", "0.1.0"),
        shape=BUILT_IN["llama-7b"],
        s_part=(SPartPoint(1024, 7.08e-3, 1e-3, 0.02), SPartPoint(1, 1.46e-3, 1e-3)),
        r_part=(
            RPartPoint("float16", context_len=256, seconds_per_token=1.239e-7, call_seconds=2e-5, **heads),  # type: ignore[arg-type]
            RPartPoint("float16", context_len=4096, seconds_per_token=1.2e-7, call_seconds=2e-5, **heads),  # type: ignore[arg-type]
        ),
        links=(LinkPoint("r0", 12.5e9, 2e-5), LinkPoint("r1", 10e9, 3e-5)),
        step_overhead_seconds=1e-3,
    )


def changed(**changes: Any) -> str:
    data = json.loads(profile().to_json()) | changes
    return json.dumps({key: value for key, value in data.items() if value is not ...})


def test_round_trip() -> None:
    assert read_profile(profile().to_json()) == profile()


def test_what_a_plan_takes_from_it() -> None:
    """Points in any order; the nearest context in proportion; the slowest link."""
    found = profile()
    assert found.measured_s_part().layer_seconds(1024) == 7.08e-3
    assert found.measured_s_part().layer_seconds(1) == 1.46e-3
    assert found.measured_r_part("float16", 900).seconds_per_token == 1.239e-7
    assert found.measured_r_part("float16", 1100).seconds_per_token == 1.2e-7
    link = found.slowest_link()
    assert link is not None and link.r_worker == "r1"
    with pytest.raises(ProfileError, match="no R-part for int8 with 32 / 32 heads of 128; it has float16"):
        found.measured_r_part("int8", 256)


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
        (changed(step_overhead_seconds=-1), "step_overhead_seconds must be a finite number"),
        (changed(step_overhead_seconds="1"), "must be of type float"),
        (changed(shape=json.loads(profile().to_json())["shape"] | {"num_layers": 0}), "num_layers must be"),
    ],
)
def test_bad_profiles(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read_profile(text)
