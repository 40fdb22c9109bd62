"""The state of this machine's GPU, which ``fastdecode doctor`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class GpuState:
    """The GPU that torch finds. ``name``: "" without one. ``no_gpu``: the reason why there is none.

    ``pinned_error``: the reason why pinned memory does not work; "" if it works.
    """

    torch_version: str
    cuda_version: str
    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    pinned_error: str = ""
    missing: tuple[str, ...] = ()
    no_gpu: str = ""


def gpu_state() -> GpuState:
    """Return the state of the GPU that torch finds, with the GPU packages that are not installed."""
    version, cuda = torch.__version__, torch.version.cuda or torch.version.hip or ""
    if not torch.cuda.is_available():
        return GpuState(version, cuda, no_gpu=_why_no_gpu())
    free, total = torch.cuda.mem_get_info()
    missing = tuple(name for name in ("triton", "torchao") if find_spec(name) is None)
    return GpuState(version, cuda, torch.cuda.get_device_name(), free, total, _pinned_error(), missing)


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (str(error).splitlines() or [""])[0].partition(". ")[0].rstrip(".")
    return ""


def _pinned_error() -> str:
    try:
        host = torch.full((64 << 20,), 7, dtype=torch.uint8).pin_memory()
        there = host.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        return "" if bool((there.cpu() == 7).all()) else "what came back differs"
    except RuntimeError as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
