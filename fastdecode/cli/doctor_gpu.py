"""Findings of ``fastdecode doctor`` about the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastdecode.cli.findings import Finding


def check_gpu() -> Iterator[Finding]:
    """Yield findings about the GPU that an S-worker here would use."""
    if find_spec("torch") is None:
        return  # the distribution for R-workers has no torch
    from fastdecode.sworker.run.gpu_findings import gpu_state

    yield from findings_of(gpu_state(), Path("/proc/driver/nvidia/version").exists())


def findings_of(state: Any, has_driver: bool) -> Iterator[Finding]:
    """Yield the findings that follow from ``state``. ``has_driver``: NVIDIA's kernel driver is loaded."""
    built = f"torch {state.torch_version}" + (f" for CUDA {state.cuda_version}" if state.cuda_version else " for CPUs")
    if not state.name and has_driver:
        other_torch = "pip install torch for your driver's CUDA: https://pytorch.org/get-started/locally"
        cure = "nvidia-smi; CUDA_VISIBLE_DEVICES; a newer driver" if state.cuda_version else other_torch
        reason = f": {state.no_gpu}" if state.no_gpu else ""
        yield Finding("broken", f"GPU: a driver is loaded, and {built} finds no GPU{reason}", cure)
        return
    if not state.name:
        yield Finding("ok", f"GPU: none, so the S-worker runs on the CPU ({built})")
        return
    free, total = state.free_bytes / 2**30, state.total_bytes / 2**30
    yield Finding("ok", f"GPU: {state.name}, {free:.1f} of {total:.1f} GiB free, {built}")
    if state.pinned_error:
        yield Finding("broken", f"pinned memory: {state.pinned_error}", "ulimit -l unlimited; more memory or /dev/shm")
    else:
        yield Finding("ok", "pinned memory: copies through it come back")
    if state.missing:
        packages = " ".join(state.missing)
        yield Finding("note", f"for the GPU, not installed: {packages}", f"pip install {packages}")
