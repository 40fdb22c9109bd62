"""The speed of this machine's GPU or CPU, measured within seconds: products, memory, and copies to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastdecode.core.machine import available_memory_bytes, cpu_name, usable_cores
from fastdecode.sworker.products.codes import block_of, quantized
from fastdecode.sworker.products.linears import IntegerProduct

READ_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}

LINK_BYTES = 256 << 20


@dataclass(frozen=True)
class DeviceSpeed:
    """Measured rates. ``host_bytes_per_second``: copies between device and host, in one direction."""

    name: str
    is_gpu: bool
    flops_per_second: float
    bytes_per_second: float
    host_bytes_per_second: float
    memory_bytes: float


def measure_device(multiplies_int8: bool = False) -> DeviceSpeed:
    """Measure the first GPU, or this machine's CPU without one.

    ``multiplies_int8``: the CPU's products are those of ``--quantization int8``.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        properties = torch.cuda.get_device_properties(device)
        link = LINK_BYTES / _copy_seconds(device)
        return DeviceSpeed(
            properties.name, True, _flops(device), _read_rate(device), link, float(properties.total_memory)
        )
    device, before = torch.device("cpu"), torch.get_num_threads()
    torch.set_num_threads(len(usable_cores()))
    try:
        flops, reading = _integer_flops() if multiplies_int8 else _flops(device), _read_rate(device)
    finally:
        torch.set_num_threads(before)
    # Bytes per second to R-workers in this process: practically unlimited, since nothing is copied
    inproc_bytes_per_second = 1e12
    return DeviceSpeed(cpu_name(), False, flops, reading, inproc_bytes_per_second, float(available_memory_bytes()))


def _flops(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 1024  # rows, columns and depth of the timed product
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / _median_seconds(lambda: left @ right, device)


def _integer_flops() -> float:
    """Return the operations per second (two per multiply-add) of an int8 linear layer on the CPU.

    The time includes the quantization of rows.
    """
    size = 1024
    linear = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16)
    product = IntegerProduct([linear], [quantized(linear.weight, block_of(size, 1, False))])
    rows = torch.randn(size, size).to(torch.bfloat16)
    return 2.0 * size**3 / _median_seconds(lambda: product.compute(rows), torch.device("cpu"))


def _read_rate(device: torch.device) -> float:
    """Return the bytes per second that the device reads from memory. A sum is timed, since it writes almost nothing."""
    numbers = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return numbers.numel() * 4 / _median_seconds(numbers.sum, device)


def _copy_seconds(device: torch.device) -> float:
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    return _median_seconds(lambda: here.copy_(there, non_blocking=True), device)


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    repeats = 5
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[repeats // 2]
