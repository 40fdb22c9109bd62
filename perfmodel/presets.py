"""GPUs and CPU hosts by name: figures of data sheets with sources, and list prices with dates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.hardware import (
    A10_WEIGHT_EFFICIENCY,
    CPU_READ_EFFICIENCY,
    FLOPS_EFFICIENCY,
    GPU_READ_EFFICIENCY,
    CpuHost,
    Figure,
    Gpu,
    ListPrice,
)

AWS = "AWS, us-east-1, on demand, 2025"


def _gpu(
    name: str,
    tflops: float,
    gb_per_s: float,
    gb: float,
    pcie_gb_per_s: float,
    nvlink_gb_per_s: float = 0.0,
    source: str = "NVIDIA data sheet",
) -> Gpu:
    """Return a GPU with a data sheet's nominal figures: dense 16-bit tensor FLOP/s with 32-bit accumulation."""
    measured = name == "a10"
    read = Figure(gb_per_s * 1e9, GPU_READ_EFFICIENCY, False, f"{source}; 0.8 taken for any GPU")
    weights = Figure(gb_per_s * 1e9, A10_WEIGHT_EFFICIENCY, True, "FastDecode paper, T(1) of a 7B layer")
    origin = "FastDecode paper" if measured else f"{source}; as the FastDecode paper's A10"
    flops = Figure(tflops * 1e12, FLOPS_EFFICIENCY, measured, origin)
    runpod = "RunPod, March 2026, by deploybase.ai"
    gpu_prices = {
        "rtx-3090": (0.22, runpod),
        "rtx-4090": (0.34, runpod),
        "rtx-5090": (0.69, runpod),
        "rtx-pro-6000": (0.89, runpod),
        "l4": (0.44, runpod),
        "l40s": (0.79, runpod),
        "a10": (0.75, "Lambda, 2025"),
        "a100": (1.39, runpod),
        "h100": (2.69, runpod),
        "h200": (3.59, runpod),
        "b200": (5.98, runpod),
        "gh200": (1.49, "Lambda, 2025, its Grace host included"),
    }
    price = ListPrice(*gpu_prices[name]) if name in gpu_prices else None
    return Gpu(
        name, flops, weights if measured else read, read, gb * 1e9, pcie_gb_per_s * 1e9, nvlink_gb_per_s * 1e9, price
    )


def _host(
    name: str,
    sockets: int,
    cores: int,
    gb_per_s: float,
    gb: float,
    source: str = "memory channels",
    holds_gpu: bool = False,
) -> CpuHost:
    """Return a host's nominal figures: memory channels times transfer rate per socket; one R-worker per socket.

    ``gb`` is assumed.
    """
    measured = name == "epyc-7452"
    origin = "FastDecode paper" if measured else f"{source}; as the FastDecode paper's Epyc 7452"
    reading = Figure(gb_per_s * 1e9, CPU_READ_EFFICIENCY, measured, origin)
    host_prices = {
        "epyc-9654": (11.13, f"{AWS}, m7a.48xlarge"),
        "xeon-8480": (9.68, f"{AWS}, m7i.48xlarge"),
        "graviton4": (4.31, f"{AWS}, m8g.24xlarge"),
        "grace": (0.0, "it comes with the GH200"),
    }
    price = ListPrice(*host_prices[name]) if name in host_prices else None
    return CpuHost(name, sockets, cores, reading, gb * 1e9, holds_gpu, price=price)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 65, 320, 16, 16),
        _gpu("l4", 121, 300, 24, 32),
        _gpu("a10", 125, 600, 24, 32),
        _gpu("l40s", 362, 864, 48, 32),
        _gpu("a100", 312, 2039, 80, 32, 300),
        _gpu("h100", 989, 3350, 80, 64, 450),
        _gpu("h200", 989, 4800, 141, 64, 450),
        _gpu("b200", 2250, 8000, 180, 64, 900),
        _gpu("gh200", 989, 4000, 96, 450, 450, "NVIDIA data sheet, 96 GB, NVLink-C2C to its Grace"),
        _gpu("mi300x", 1307, 5300, 192, 64, 448, "AMD data sheet, 7 links of 64 GB/s"),
        _gpu("rtx-3090", 71, 936, 24, 32, 56, "NVIDIA GA102 whitepaper"),
        _gpu("rtx-4090", 165, 1008, 24, 32, 0, "NVIDIA Ada whitepaper"),
        _gpu("rtx-5090", 209.5, 1792, 32, 64, 0, "NVIDIA RTX Blackwell whitepaper"),
        _gpu("rtx-pro-6000", 503.8, 1792, 96, 64, 0, "NVIDIA RTX PRO Blackwell whitepaper"),
    )
}
"""GPUs by name. A100 (80 GB), H100, H200 and B200 are the SXM versions; RTX PRO 6000 is the Blackwell generation."""

CPU_HOSTS = {
    host.name: host
    for host in (
        _host("epyc-7452", 2, 32, 8 * 25.6, 128),
        _host("epyc-9654", 2, 96, 12 * 38.4, 384),
        _host("epyc-9754", 2, 128, 12 * 38.4, 384),
        _host("epyc-9965", 2, 192, 12 * 51.2, 768, "12 channels of DDR5-6400"),
        _host("xeon-8480", 2, 56, 8 * 38.4, 256),
        _host("xeon-6980p", 2, 128, 12 * 70.4, 768, "12 channels of MRDIMM-8800"),
        _host("graviton4", 1, 96, 12 * 44.8, 384, "12 channels of DDR5-5600"),
        _host("grace", 1, 72, 512, 480, "LPDDR5X, NVIDIA data sheet; beside a GH200's GPU", True),
        _host("threadripper-7995wx", 1, 96, 8 * 41.6, 256, "8 channels of DDR5-5200", True),
        _host("ryzen-9950x", 1, 16, 2 * 44.8, 64, "2 channels of DDR5-5600", True),
        _host("m3-ultra", 1, 24, 819, 256, "Apple, unified memory; of 32 cores the 24 fast ones"),
        _host("laptop", 1, 8, 2 * 38.4, 32, "2 channels of DDR5-4800", True),
    )
}
"""CPU hosts by name.

Servers with 2 have two sockets: 8 channels of DDR4-3200, 12 and 12 of DDR5-4800, 8 of DDR5-4800.
"""

_Preset = TypeVar("_Preset", Gpu, CpuHost)

NUMBERS = {
    "gpu": "1792GB/s:210TFLOPS:32GiB",
    "cpu": "90GB/s:16cores:64GiB",
}
"""Examples of machines in numbers, for errors."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name. A ConfigError lists the known ones."""
    return _find("gpu", GPUS, name)


def find_cpu_host(name: str) -> CpuHost:
    """Return the CPU host of that name. A ConfigError lists the known ones."""
    return _find("cpu", CPU_HOSTS, name)


def _find(flag: str, presets: Mapping[str, _Preset], name: str) -> _Preset:
    key = _key(name)
    matches = [preset for preset in presets if _key(preset) == key]
    # Fewest letters and digits at a name's end that identify a preset, such as 5090 and 9950x
    least_key = 4
    if not matches and len(key) >= least_key:
        matches = [preset for preset in presets if _key(preset).endswith(key)]
    if len(matches) != 1:
        raise ConfigError(
            f"{flag} must be one of {', '.join(presets)}, not {name!r}; or numbers such as {NUMBERS[flag]}, or here"
        )
    return presets[matches[0]]


def _key(name: str) -> str:
    """Return letters and digits only, so that `RTX 5090`, `rtx_5090` and `rtx-5090` are one name."""
    return "".join(each for each in name.lower() if each.isalnum())
