"""Findings of ``fastdecode doctor`` about the GPU."""

from __future__ import annotations

import pytest
import torch

from fastdecode.cli.doctor_gpu import check_gpu, findings_of
from fastdecode.sworker.run.gpu_findings import GpuState, gpu_state

H100 = GpuState("2.13.0", "12.8", "NVIDIA H100", 70 << 30, 80 << 30)

OLD = GpuState("2.13.0", "12.8", no_gpu="The NVIDIA driver on your system is too old (found version 11040)")


@pytest.mark.parametrize(
    ("state", "has_driver", "levels", "said"),
    [
        (
            GpuState("2.13.0+cpu", ""),
            False,
            ["ok"],
            "none, so the S-worker runs on the CPU (torch 2.13.0+cpu for CPUs)",
        ),
        (
            GpuState("2.13.0+cpu", ""),
            True,
            ["broken"],
            "a driver is loaded, and torch 2.13.0+cpu for CPUs finds no GPU",
        ),
        (GpuState("2.13.0", "12.8"), True, ["broken"], "torch 2.13.0 for CUDA 12.8 finds no GPU"),
        (OLD, True, ["broken"], "torch 2.13.0 for CUDA 12.8 finds no GPU: The NVIDIA driver on your system is too old"),
        (H100, True, ["ok", "ok"], "NVIDIA H100, 70.0 of 80.0 GiB free, torch 2.13.0 for CUDA 12.8"),
        (GpuState(*vars(H100).values()), True, ["ok", "ok"], "pinned memory: copies through it come back"),
    ],
)
def test_what_is_found_is_said(state: GpuState, has_driver: bool, levels: list[str], said: str) -> None:
    found = [*findings_of(state, has_driver)]
    assert [each.level for each in found] == levels and any(said in each.what for each in found)
    assert all(each.level == "ok" or each.cure for each in found)


def test_what_is_missing_comes_with_its_cure() -> None:
    state = GpuState("2.13.0", "12.8", "NVIDIA H100", 70 << 30, 80 << 30, "cannot pin", ("triton",))
    _, pinned, missing = findings_of(state, True)
    assert (pinned.level, pinned.what) == ("broken", "pinned memory: cannot pin")
    assert missing.cure == "pip install triton"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("The NVIDIA driver is too old (found version 11040). Please update it."),
            "(found version 11040)",
        ),
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (RuntimeError(""), ""),
    ],
)
def test_torchs_reason_is_kept(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers that are too old, builds for CPUs, and errors without words, by stand-ins for torch's."""

    def fails() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fails)
    state = gpu_state()
    assert state.name == "" and state.no_gpu.endswith(said) and "Please" not in state.no_gpu
    ((finding),) = findings_of(state, has_driver=True)
    assert said in finding.what and finding.cure


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_this_machine_is_looked_at() -> None:
    assert [each.level for each in check_gpu()] in (["ok"], ["broken"])
