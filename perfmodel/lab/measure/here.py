"""Measures this machine for a plan in a few seconds: an R-worker's reads, the S-worker's matrix products, the link."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from fastdecode.core.machine import available_memory_bytes, cpu_name, usable_cores
from fastdecode.perfmodel.hardware import CpuHost, Figure, Gpu
from fastdecode.perfmodel.lab.measure.attention_cache import FilledCache
from fastdecode.perfmodel.lab.measure.attention_shape import AttentionShape, ContextLen
from fastdecode.sworker.run.device_speed import DeviceSpeed, measure_device

CACHE_BYTES = 384 << 20
"""Size of the cache that is read: larger than last-level caches, and filled within a second."""

MEASURED = "measured here"


def cpu_here() -> CpuHost:
    """Time attention on this machine; return it as an R-worker host with the KV bytes per second that were read."""
    threads = len(usable_cores())
    # The timed attention: each head has its own keys and values, so that reading is the limit
    num_heads, head_dim, context = 8, 128, ContextLen(1024, 1024)
    shape = AttentionShape("auto", "bfloat16", num_heads, num_heads, head_dim, context, None, 1, threads)
    cache_bytes = min(CACHE_BYTES, available_memory_bytes() // 8)
    lengths = shape.lengths(cache_bytes, seed=0)
    calls = 7
    with closing(FilledCache(shape, lengths, seed=0)) as cache:
        cache.call()
        seconds = float(np.median([cache.call()[1] for _ in range(calls)]))
    rate = int(lengths.sum()) * shape.layout.kv_bytes_per_token / seconds
    reading = Figure(rate, 1.0, True, f"{MEASURED}: attention of an R-worker with {threads} threads")
    return CpuHost(f"this machine ({cpu_name()})", 1, threads, reading, available_memory_bytes(), holds_gpu=True)


def gpu_here(multiplies_int8: bool = False) -> tuple[Gpu, bool]:
    """Measure this machine's S-worker device; return its figures, and True for a GPU, False for the CPU.

    ``multiplies_int8``: a CPU's linear layers multiply int8.
    """
    found = measure_device(multiplies_int8)
    return _as_gpu(found, "int8" if multiplies_int8 else "bfloat16"), found.is_gpu


def _as_gpu(found: DeviceSpeed, multiplied: str) -> Gpu:
    reading = Figure(found.bytes_per_second, 1.0, True, f"{MEASURED}: reading on {found.name}")
    flops = Figure(found.flops_per_second, 1.0, True, f"{MEASURED}: {multiplied} products on {found.name}")
    name = f"this machine's {found.name}" if found.is_gpu else f"this machine's CPU ({found.name}), for want of a GPU"
    return Gpu(name, flops, reading, reading, found.memory_bytes, found.host_bytes_per_second)
