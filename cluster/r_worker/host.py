"""The machine of an R-worker, its resources, and the C++ R-worker made from them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.r_worker.audits import check_forks
from fastdecode.cluster.r_worker.tuning import READ_BYTES, Tuning, forced_isa, tuning
from fastdecode.cluster.wire.handshake import Security
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
from fastdecode.core.optional import optional
from fastdecode.core.parked import ParkPlace
from fastdecode.core.types import WorkerPlan, WorkerReport
from fastdecode.core.weighing import Weighing
from fastdecode.kinds.layout import KVLayout


@dataclass(frozen=True)
class RWorkerSize:
    """Memory and threads of one R-worker. Thread i is pinned to ``cores[i % len(cores)]``; empty means unpinned."""

    kv_cache_bytes: int
    num_threads: int
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Host:
    """An R-worker's resources: memory, threads, read bandwidth, machine, cores, and a disk for parking if any.

    ``faults``: faults of the host that tests inject.
    """

    size: RWorkerSize
    tuning: Tuning
    read_gb_per_s: float
    host_id: str
    cores: tuple[int, ...]
    park: Any = None
    faults: Any = None

    def make(self, layout: KVLayout, block_size: int) -> _rworker.RWorker:
        """Return a C++ R-worker in this host's memory, with the host's faults: see ``make_rworker``."""
        worker = make_rworker(layout, block_size, self.size)
        if self.faults is None:
            return worker
        return optional("faults").FaultyRWorker(worker, self.faults, layout.audited_layers)

    def close(self) -> None:
        """Release the disk for another R-worker; may be called twice."""
        if self.park:
            self.park.close()

    def describe(self) -> str:
        """Return cores, threads, instruction set, memory and bandwidth in one line."""
        return (
            f"cores {_ranges(self.cores)}, {self.size.num_threads} thread(s), "
            f"{self.tuning.isa} (read-ahead {self.tuning.read_ahead}), "
            f"{self.size.kv_cache_bytes / 2**30:.2f} GiB of KV cache, reads {self.read_gb_per_s:.1f} GB/s"
        )


def take_host(
    cores: list[int] | None, num_threads: int | None, kv_cache_bytes: int | None, park: ParkPlace | None = None
) -> Host:
    """Bind this process to ``cores`` and measure its read bandwidth; return the resources.

    None means all cores, one thread per core, and KV_CACHE_SHARE of the free memory. With a CPU quota threads are not
    pinned, since all containers of a host would choose its first cores. Raise ConfigError or CapacityError for missing
    resources, and BackendError for kernels with wrong results.
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
    pinned = () if cores is None and has_cpu_quota() else bound
    size = RWorkerSize(kv_cache_bytes or int(free * KV_CACHE_SHARE), threads, pinned)
    check_isa(tuned.isa)
    bandwidth = _rworker.read_peak(threads, max(READ_BYTES, threads << 20), 3)
    directory = optional("park directory").ParkDirectory(park) if park else None
    return Host(size, tuned, bandwidth, host_id(), bound, directory)


@cache
def check_isa(isa: str) -> None:
    """Raise BackendError if an instruction set gives wrong results here. The test runs once per process, in 10 ms."""
    refusal = _rworker.self_test(isa)
    if refusal:
        raise BackendError(refusal)


def make_rworker(layout: KVLayout, block_size: int, size: RWorkerSize) -> _rworker.RWorker:
    """Return a C++ R-worker with a cache of as many blocks as fit.

    Raise CapacityError if not even one block fits, ValueError for an impossible layout, and ConfigError for an
    instruction set that is missing.

    Raise BackendError, as ``check_isa`` does, for kernels with wrong results.
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
    worker.commit_ahead()
    return worker


@contextlib.contextmanager
def _out_of_resources(size: RWorkerSize) -> Iterator[None]:
    """Turn the system's errors about missing memory or threads into a CapacityError."""
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


def make_layer_cache(
    layout: KVLayout, num_tokens: int, num_threads: int, cores: tuple[int, ...], block_size: int = 0
) -> _rworker.RWorker:
    """Return a cache for one sequence of ``num_tokens`` and one layer, or one layer and its index.

    ``block_size``: tokens per block; 0: this function chooses, since the block size does not affect results.

    If this process lacks the layout's instruction set, the cache uses the fastest that this process has.
    """
    layout = layout.absorbed
    if not attends_in(layout.isa):
        layout = replace(layout, isa="auto")
    layer_cache_block = 256
    block_size = block_size or math.gcd(layer_cache_block, *(layer.block_tokens for layer in layout.layers))
    of_block = block_bytes(layout, block_size)
    states = [layout.sequence_bytes(layer) for layer in range(len(layout.layers))]
    state_blocks = sum(2 * each // of_block + 1 for each in states if each)
    num_bytes = (-(-num_tokens // block_size) + state_blocks) * of_block
    return make_rworker(layout, block_size, RWorkerSize(num_bytes, num_threads, cores))


def attends_in(isa: str) -> bool:
    """Return whether this process can attend in the arithmetic of ``isa`` (one of ``ISAS``, or "auto")."""
    return isa == "auto" or (has_isa(isa) and forced_isa() in ("auto", isa))


def has_isa(isa: str) -> bool:
    """Return whether this processor has ``isa``, one of ``ISAS``."""
    return isa in _rworker.supported_isas()


def block_bytes(layout: KVLayout, block_size: int) -> int:
    """Return the bytes of a block of ``block_size`` tokens over all layers."""
    return _rworker.block_bytes(list(layout.layers), layout.kv_dtype, block_size)


def begin_step(worker: _rworker.RWorker, plan: WorkerPlan) -> None:
    """Give ``worker`` its plan. Raise ValueError or KeyError if the plan is impossible.

    Raise DamagedError if the plan forks a prefix with blocks that differ from their checksums.
    """
    check_forks(worker, plan.controls)
    worker.begin_step(_columns(plan.controls), [_columns(spans) for spans in plan.mini_batches])


def end_step(worker: _rworker.RWorker, leaving: bool = False) -> WorkerReport:
    """Commit the step; return busy times on this machine's clock, with ``transfer_seconds`` 0."""
    busy_start, busy_end, bytes_read, blocks_free = worker.end_step()
    return WorkerReport(busy_start, busy_end, 0.0, bytes_read, blocks_free, leaving)


def weigh(worker: _rworker.RWorker, asked: Weighing) -> np.ndarray:
    """Return attention weights per block, or (max, sum) of scores per head. Raise ValueError or KeyError on failure."""
    part, queries = asked.part, list(asked.queries)
    found = worker.weigh(
        sequence_id=part.sequence_id, position=part.position, offset=part.offset, block=asked.block,
        layers=list(asked.layers), queries=queries, norms=asked.norms, finds_norms=asked.finds_norms,
    )  # fmt: skip
    if not asked.finds_norms and len(found) != asked.num_blocks:
        raise ValueError(f"weigh: {part.num_tokens} tokens make {asked.num_blocks} blocks, not {len(found)}")
    return found


def _columns(records: np.ndarray) -> np.ndarray:
    """Return records of four int64 fields as int64 [n, 4]."""
    return np.ascontiguousarray(records).view(np.int64).reshape(-1, 4)


def _bind(cores: list[int]) -> None:
    if not CAN_BIND:
        raise ConfigError("cores: this system binds no process to cores; leave --cores out, or give --threads")
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(f"cores: this process cannot use {_ranges(cores)}: {error.strerror}") from None
    missing = sorted(set(cores) - allowed_cores())
    if missing:
        raise ConfigError(f"cores: this process cannot use {_ranges(missing)}")


def _ranges(cores: list[int] | tuple[int, ...]) -> str:
    """Return a short form of core numbers: "0-2,5" for [0, 1, 2, 5]."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def open_kv_port(worker: _rworker.RWorker, layout: KVLayout, security: Security, host: str = "") -> Any:
    """Open a KV port; see ``KvPort``. Raise ValueError if it cannot be opened."""
    try:
        return optional("KV port").KvPort(worker, layout, security, host)
    except OSError as error:
        raise ValueError(f"kv_port: {error.strerror}") from None
