"""The machine an R-worker finds itself on: who it is, which cores it gets, what they can read."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from fastdecode import _rworker
from fastdecode.cluster.local import RWorkerSize, check_isa
from fastdecode.cluster.tuning import Tuning, tuning
from fastdecode.errors import CapacityError, ConfigError
from fastdecode.machine import available_memory_bytes, total_memory_bytes, usable_cores

READ_BYTES = 1 << 27
"""Bytes of each pass of the bandwidth measurement: more than most caches hold, and done in a blink."""

KV_CACHE_SHARE = 0.40
"""Part of the free memory that an R-worker takes where it was not told."""


@dataclass(frozen=True)
class Host:
    """What an R-worker has: memory and threads, its bandwidth, and the machine and cores it runs on."""

    size: RWorkerSize
    tuning: Tuning
    read_gb_per_s: float
    host_id: str
    cores: tuple[int, ...]

    def describe(self) -> str:
        """Cores, threads, instruction set, memory and bandwidth, for people."""
        return (
            f"cores {_ranges(self.cores)}, {self.size.num_threads} thread(s), "
            f"{self.tuning.isa} ({self.tuning.streams} stream(s)), "
            f"{self.size.kv_cache_bytes / 2**30:.2f} GiB of KV cache, reads {self.read_gb_per_s:.1f} GB/s"
        )


def take_host(cores: list[int] | None, num_threads: int | None, kv_cache_bytes: int | None) -> Host:
    """Bind this process to ``cores`` and measure what its threads read; None: all cores, a thread each, a share.

    ConfigError or CapacityError for what this machine does not have, BackendError for kernels that it gets wrong.
    """
    if cores is not None:
        _bind(cores)
    bound = tuple(sorted(os.sched_getaffinity(0)) if cores is not None else usable_cores())
    free = available_memory_bytes()
    if kv_cache_bytes is not None and kv_cache_bytes > free:
        raise CapacityError(
            f"kv_cache_memory: {kv_cache_bytes / 2**30:.2f} GiB are more than the {free / 2**30:.2f} GiB that are free "
            f"of this machine's {total_memory_bytes() / 2**30:.2f} GiB"
        )
    threads = num_threads or len(bound)
    size = RWorkerSize(kv_cache_bytes or int(free * KV_CACHE_SHARE), threads, bound)
    tuned = tuning()
    check_isa(tuned.isa)
    bandwidth = _rworker.read_peak(threads, max(READ_BYTES, threads << 20), 3)
    return Host(size, tuned, bandwidth, host_id(), bound)


def host_id() -> str:
    """The same for all processes of one boot of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def process_name() -> str:
    """This process as another machine's people would look for it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _bind(cores: list[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(f"cores: this machine does not give {_ranges(cores)}: {error.strerror}") from None
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise ConfigError(f"cores: this machine does not give {_ranges(missing)}")


def _ranges(cores: list[int] | tuple[int, ...]) -> str:
    """0-2,5 for [0, 1, 2, 5]."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
