"""plan and simulate with ``--quantization int8``, and profiles that were measured in this mode."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.hardware import profile

from fastdecode.cli.main import main
from fastdecode.perfmodel.lab.cli import named_machine
from fastdecode.perfmodel.lab.measure import here
from fastdecode.perfmodel.presets import find_cpu_host
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import read_profile, write_profile
from fastdecode.sworker.run.device_speed import DeviceSpeed


def measured(multiplies_int8: bool) -> HardwareProfile:
    shape = dataclasses.replace(profile().shape, multiplies_int8=multiplies_int8)
    return dataclasses.replace(profile(), shape=shape)


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--seq-len", "512"],
        ["simulate", "--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452"],
        ["simulate", "--model", "llama-7b", "--gpu", "a10", "--num-r-workers", "0"],
    ],
)
def test_a_gpu_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--quantization", "int8"]) == 2
    assert "quantization: int8 is multiplied on CPUs" in capsys.readouterr().err


def test_bare_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--s-part-seconds", "7e-3", "--r-part-seconds-per-token", "1e-7", "--num-layers", "32"]
    workload = ["--seq-len", "512", "--mini-batch-size", "64", "--quantization", "int8"]
    assert main(["plan", *numbers, *workload]) == 2
    assert "quantization has no place beside bare numbers" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("of_profile", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_a_profile_of_another_mode_is_refused(
    command: str, of_profile: bool, asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model by name runs as the flags say; the profile must have been measured in the same mode."""
    path = tmp_path / "profile.json"
    path.write_text(write_profile(measured(of_profile)))
    assert read_profile(path.read_text()).shape.multiplies_int8 == of_profile
    words = ["--profile", str(path), "--model", measured(of_profile).shape.name]
    words += ["--seq-len", "512"] if command == "plan" else ["--num-prompts", "4"]
    failed = main([command, *words, *(["--quantization", "int8"] if asked else [])])
    error = capsys.readouterr().err
    assert failed == (0 if asked == of_profile else 1)
    assert ("--quantization int8" in error) == (asked != of_profile)


def test_int8_on_this_cpu_halves_loads_and_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T(B) loads int8 weights and multiplies at the rate of int8 products, which is measured here."""
    speed = DeviceSpeed("CPU", False, 1e12, 1e10, 1e12, 1e12)
    monkeypatch.setattr(
        here, "measure_device", lambda int8: dataclasses.replace(speed, flops_per_second=2e12) if int8 else speed
    )
    host = dataclasses.replace(find_cpu_host("epyc-7452"), holds_gpu=True, r_workers_per_host=1)
    monkeypatch.setattr(here, "cpu_here", lambda: host)
    named_machine._gpu.cache_clear()
    named_machine._cpu_host.cache_clear()
    words = ["plan", "--model", "llama-7b", "--gpu", "here", "--cpu", "here", "--seq-len", "64"]
    words += ["--mini-batch-size", "8", "--output-json", str(tmp_path / "plan.json")]
    seconds = []
    for more in ([], ["--quantization", "int8"]):
        assert main([*words, *more]) == 0
        seconds.append(json.loads((tmp_path / "plan.json").read_text())["step_seconds"])
    assert "linear layers multiply int8 (--quantization int8)" in capsys.readouterr().out
    assert 0.5 < seconds[1] / seconds[0] < 0.6
    named_machine._gpu.cache_clear()
    named_machine._cpu_host.cache_clear()
