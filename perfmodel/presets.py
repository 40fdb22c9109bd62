"""GPUs and CPU hosts by name: vendors' figures, and how much of each a plan counts on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastdecode.errors import ConfigError
from fastdecode.perfmodel.hardware import CpuHost, Figure, Gpu

FLOPS_EFFICIENCY = 0.62
"""Of nominal 16-bit tensor FLOP/s, in large products: the FastDecode paper's A10."""

GPU_READ_EFFICIENCY = 0.8
"""Of nominal GPU memory bandwidth; nothing in the papers gives it, and it is kind to the GPU-only alternative."""

A10_WEIGHT_EFFICIENCY = 0.46
"""FastDecode's T(1) of 1.46 ms for the 402 MB of a 7B layer, launches included, against 600 GB/s."""

CPU_READ_EFFICIENCY = 0.645
"""FastDecode's R-part on Epyc 7452: 132 GB/s of KV per socket of 205 nominal; its figures lie between 0.64 and 0.72."""


def _gpu(name: str, tflops: float, gb_per_s: float, gb: float, pcie_gb_per_s: float) -> Gpu:
    """Nominal figures of NVIDIA's data sheets: dense 16-bit tensor FLOP/s with 32-bit sums where they differ."""
    measured = name == "a10"
    read = Figure(gb_per_s * 1e9, GPU_READ_EFFICIENCY, False, "NVIDIA data sheet; 0.8 taken for any GPU")
    weights = Figure(gb_per_s * 1e9, A10_WEIGHT_EFFICIENCY, True, "FastDecode paper, T(1) of a 7B layer")
    source = "FastDecode paper" if measured else "NVIDIA data sheet; as the FastDecode paper's A10"
    flops = Figure(tflops * 1e12, FLOPS_EFFICIENCY, measured, source)
    return Gpu(name, flops, weights if measured else read, read, gb * 1e9, pcie_gb_per_s * 1e9)


def _host(name: str, sockets: int, cores: int, gb_per_s: float, gb: float) -> CpuHost:
    """Nominal: memory channels times transfer rate, per socket; one R-worker per socket; ``gb`` is assumed."""
    measured = name == "epyc-7452"
    source = "FastDecode paper" if measured else "memory channels; as the FastDecode paper's Epyc 7452"
    return CpuHost(name, sockets, cores, Figure(gb_per_s * 1e9, CPU_READ_EFFICIENCY, measured, source), gb * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 65, 320, 16, 16),
        _gpu("l4", 121, 300, 24, 32),
        _gpu("a10", 125, 600, 24, 32),
        _gpu("a100", 312, 2039, 80, 32),
        _gpu("h100", 989, 3350, 80, 64),
        _gpu("h200", 989, 4800, 141, 64),
        _gpu("rtx-4090", 165, 1008, 24, 32),
    )
}
"""A100, H100 and H200 are the SXM versions, the A100 with 80 GB."""

CPU_HOSTS = {
    host.name: host
    for host in (
        _host("epyc-7452", 2, 32, 8 * 25.6, 128),
        _host("epyc-9654", 2, 96, 12 * 38.4, 384),
        _host("epyc-9754", 2, 128, 12 * 38.4, 384),
        _host("xeon-8480", 2, 56, 8 * 38.4, 256),
    )
}
"""Two sockets each: 8 channels of DDR4-3200, 12 and 12 of DDR5-4800, 8 of DDR5-4800."""

_Preset = TypeVar("_Preset", Gpu, CpuHost)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name; ConfigError lists those there are."""
    return _find("gpu", GPUS, name)


def find_cpu_host(name: str) -> CpuHost:
    """The CPU host of that name; ConfigError lists those there are."""
    return _find("cpu", CPU_HOSTS, name)


def _find(flag: str, presets: Mapping[str, _Preset], name: str) -> _Preset:
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = {"rtx4090": "rtx-4090", "4090": "rtx-4090"}.get(key, key)
    if key not in presets:
        raise ConfigError(f"{flag} must be one of {', '.join(presets)}, not {name!r}; measured figures: --profile")
    return presets[key]
