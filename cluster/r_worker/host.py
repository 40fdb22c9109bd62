"""The machine an R-worker runs on, what it gives an R-worker, and the C++ R-worker made from that."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.r_worker.parking.directory import ParkDirectory
from fastdecode.cluster.r_worker.tuning import READ_BYTES, Tuning, forced_isa, tuning
from fastdecode.core.errors import BackendError, CapacityError, ConfigError
from fastdecode.core.machine import (
    CAN_BIND,
    KV_CACHE_SHARE,
    allowed_cores,
    available_memory_bytes,
    has_cpu_quota,
    host_id,
    total_memory_bytes,
    usable_cores,
)
from fastdecode.core.parked import ParkPlace
from fastdecode.core.types import WorkerPlan, WorkerReport
from fastdecode.core.weighing import Weighing
from fastdecode.kinds.layout import KVLayout

LAYER_CACHE_BLOCK = 256
"""Tokens of a block of a cache that holds one layer of one prompt: it makes no difference to a token."""


@dataclass(frozen=True)
class RWorkerSize:
    """Memory and threads of one R-worker; thread i is pinned to ``cores[i % len(cores)]`` (empty: unpinned)."""

    kv_cache_bytes: int
    num_threads: int
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Host:
    """An R-worker's memory and threads, its read bandwidth, the machine and cores it runs on, and its disk to park on,
    if any."""

    size: RWorkerSize
    tuning: Tuning
    read_gb_per_s: float
    host_id: str
    cores: tuple[int, ...]
    park: ParkDirectory | None = None

    def close(self) -> None:
        """Let another R-worker have the disk; may be called twice."""
        if self.park:
            self.park.close()

    def describe(self) -> str:
        """Cores, threads, instruction set, memory and bandwidth in one line."""
        return (
            f"cores {_ranges(self.cores)}, {self.size.num_threads} thread(s), "
            f"{self.tuning.isa} (read-ahead {self.tuning.read_ahead}), "
            f"{self.size.kv_cache_bytes / 2**30:.2f} GiB of KV cache, reads {self.read_gb_per_s:.1f} GB/s"
        )


def take_host(
    cores: list[int] | None, num_threads: int | None, kv_cache_bytes: int | None, park: ParkPlace | None = None
) -> Host:
    """Bind this process to ``cores`` and measure its read bandwidth.

    None means all cores, one thread per core, and KV_CACHE_SHARE of the free memory. Where the cgroup has a quota of
    processor time, threads are not pinned: all containers of a host would be on its first cores. ConfigError or
    CapacityError for what this machine does not have, BackendError for kernels that it gets wrong.
    """
    tuned = tuning()
    if cores is not None:
        _bind(cores)
    bound = tuple(sorted(allowed_cores()) if cores is not None else usable_cores())
    free = available_memory_bytes()
    if kv_cache_bytes is not None and kv_cache_bytes > free:
        raise CapacityError(
            f"kv_cache_memory: {kv_cache_bytes / 2**30:.2f} GiB are more than the {free / 2**30:.2f} GiB that are free "
            f"of this machine's {total_memory_bytes() / 2**30:.2f} GiB"
        )
    threads = num_threads or len(bound)
    pinned = () if cores is None and has_cpu_quota() else bound  # a quota says how much, not which cores
    size = RWorkerSize(kv_cache_bytes or int(free * KV_CACHE_SHARE), threads, pinned)
    check_isa(tuned.isa)
    bandwidth = _rworker.read_peak(threads, max(READ_BYTES, threads << 20), 3)
    return Host(size, tuned, bandwidth, host_id(), bound, ParkDirectory(park) if park else None)


@cache
def check_isa(isa: str) -> None:
    """BackendError if this machine or build gets an instruction set wrong; tested once per process, in 10 ms."""
    refusal = _rworker.self_test(isa)
    if refusal:
        raise BackendError(refusal)


def make_rworker(layout: KVLayout, block_size: int, size: RWorkerSize) -> _rworker.RWorker:
    """A cache of as many blocks as fit; CapacityError if not even one does, ValueError for an impossible layout,
    ConfigError for an instruction set that is not to be had.

    BackendError, as ``check_isa``, for kernels that do not compute what they should.
    """
    tuned, forced = tuning(), forced_isa()
    if "auto" not in (forced, layout.isa) and forced != layout.isa:
        raise ConfigError(f"the S-worker asks for {layout.isa} arithmetic, and FASTDECODE_ISA is {forced} here")
    if layout.isa != "auto" and not has_isa(layout.isa):
        known = ", ".join(_rworker.supported_isas())
        raise ConfigError(f"uniform_arithmetic: this R-worker's processor has {known}, and not {layout.isa}")
    num_bytes = block_bytes(layout, block_size)
    num_blocks = (size.kv_cache_bytes - layout.weight_bytes) // num_bytes
    if num_blocks < 1:
        beside = (
            f" beside {layout.weight_bytes:,} bytes of weights (--latent-absorption r)" if layout.weight_bytes else ""
        )
        raise CapacityError(
            f"a KV cache of {size.kv_cache_bytes:,} bytes per R-worker holds not even one block of "
            f"{block_size} tokens, which takes {num_bytes:,} bytes{beside}; give more --kv-cache-memory"
        )
    with _out_of_resources(size):
        worker = _rworker.RWorker(
            layers=list(layout.layers),
            model_dtype=layout.model_dtype,
            kv_dtype=layout.kv_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            num_threads=size.num_threads,
            cores=list(size.cores),
            isa=tuned.isa if layout.isa == "auto" else layout.isa,
            read_ahead=tuned.read_ahead,
        )
    check_isa(worker.isa)
    return worker


@contextlib.contextmanager
def _out_of_resources(size: RWorkerSize) -> Iterator[None]:
    """What the system does not give becomes a CapacityError."""
    try:
        yield
    except MemoryError:
        raise CapacityError(
            f"there is no memory for a KV cache of {size.kv_cache_bytes:,} bytes; give less --kv-cache-memory, or "
            f"--prefill-scratch where prompts are computed"
        ) from None
    except RuntimeError as error:  # std::system_error of a thread that did not start
        raise CapacityError(
            f"an R-worker's {size.num_threads} thread(s) do not start ({error}): give fewer threads, or R-workers"
        ) from None


def make_layer_cache(layout: KVLayout, num_tokens: int, num_threads: int, cores: tuple[int, ...]) -> _rworker.RWorker:
    """A cache for ``layout``, that of one layer, or of one and its index, and a sequence of ``num_tokens``.

    Where this process does not attend in the arithmetic that ``layout`` names, it does in its own.
    """
    layout = layout.absorbed
    if not attends_in(layout.isa):
        layout = replace(layout, isa="auto")
    block_size = math.gcd(LAYER_CACHE_BLOCK, *(layer.block_tokens for layer in layout.layers))
    of_block = block_bytes(layout, block_size)
    states = [layout.sequence_bytes(layer) for layer in range(len(layout.layers))]
    state_blocks = sum(2 * each // of_block + 1 for each in states if each)
    num_bytes = (-(-num_tokens // block_size) + state_blocks) * of_block
    return make_rworker(layout, block_size, RWorkerSize(num_bytes, num_threads, cores))


def attends_in(isa: str) -> bool:
    """Say whether this process attends in the arithmetic of ``isa``, one of ``ISAS`` or "auto", if it is asked to."""
    return isa == "auto" or (has_isa(isa) and forced_isa() in ("auto", isa))


def has_isa(isa: str) -> bool:
    """Say whether this processor has ``isa``, one of ``ISAS``."""
    return isa in _rworker.supported_isas()


def block_bytes(layout: KVLayout, block_size: int) -> int:
    """Bytes that a block of ``block_size`` tokens takes, over all layers."""
    return _rworker.block_bytes(list(layout.layers), layout.kv_dtype, block_size)


def begin_step(worker: _rworker.RWorker, plan: WorkerPlan) -> None:
    """Give ``worker`` its plan; ValueError or KeyError if the plan is impossible."""
    worker.begin_step(_columns(plan.controls), [_columns(spans) for spans in plan.mini_batches])


def end_step(worker: _rworker.RWorker, leaving: bool = False) -> WorkerReport:
    """Commit the step; busy times on this machine's clock, ``transfer_seconds`` 0."""
    busy_start, busy_end, bytes_read, blocks_free = worker.end_step()
    return WorkerReport(busy_start, busy_end, 0.0, bytes_read, blocks_free, leaving)


def weigh(worker: _rworker.RWorker, asked: Weighing) -> np.ndarray:
    """Return how a query's attention is shared, or its norms; ValueError or KeyError if that is impossible."""
    part, queries = asked.part, list(asked.queries)
    found = worker.weigh(
        sequence_id=part.sequence_id, position=part.position, offset=part.offset, block=asked.block,
        layers=list(asked.layers), queries=queries, norms=asked.norms, finds_norms=asked.finds_norms,
    )  # fmt: skip
    if not asked.finds_norms and len(found) != asked.num_blocks:
        raise ValueError(f"weigh: {part.num_tokens} tokens make {asked.num_blocks} blocks, and {len(found)} are here")
    return found


def _columns(records: np.ndarray) -> np.ndarray:
    """Records of four int64 fields as int64 [n, 4]."""
    return np.ascontiguousarray(records).view(np.int64).reshape(-1, 4)


def _bind(cores: list[int]) -> None:
    if not CAN_BIND:
        raise ConfigError("cores: this system binds no process to cores; leave --cores away, or give --threads")
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(f"cores: this machine does not give {_ranges(cores)}: {error.strerror}") from None
    missing = sorted(set(cores) - allowed_cores())
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
