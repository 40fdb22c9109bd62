"""Cores and memory of a run: who gets what, and whether it is enough."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fastdecode.config import EngineConfig
from fastdecode.errors import CapacityError
from fastdecode.machine import KV_CACHE_SHARE, available_memory_bytes, usable_cores
from fastdecode.types import ITEM_BYTES, KVLayout, RWorkerInfo

SCRATCH_SHARE = 1 / 8
"""Part of the free memory that prompts in progress may take on the S-worker by default."""


def pin_s_worker(config: EngineConfig) -> int:
    """Bind this thread to the S-worker's cores, if it was given any; returns the threads it may use."""
    if config.s_core_list:
        os.sched_setaffinity(0, config.s_core_list)
    return s_thread_count(config)


def s_thread_count(config: EngineConfig) -> int:
    """Threads of a matrix product of the S-worker: one per core it has, unless told."""
    return config.s_threads or len(config.s_core_list or usable_cores())


def kv_cache_bytes(config: EngineConfig) -> int:
    """KV cache of each R-worker on this machine, in bytes."""
    wanted = config.bytes_of("kv_cache_memory")
    return wanted or int(available_memory_bytes() * KV_CACHE_SHARE) // config.num_r_workers


def scratch_tokens(config: EngineConfig, layout: KVLayout, free_bytes: int) -> int:
    """Prompt tokens whose keys and values, in the model's dtype, the S-worker may hold of its free memory."""
    elements = sum(layer.kv_elements_per_token for layer in layout.layers)
    wanted = config.bytes_of("prefill_scratch")
    available = int(free_bytes * SCRATCH_SHARE) if wanted is None else wanted
    return available // (elements * ITEM_BYTES[layout.model_dtype])


def check_room(max_model_len: int, layout: KVLayout, workers: Sequence[RWorkerInfo]) -> None:
    """Every R-worker must hold one longest sequence; CapacityError says how much memory that takes."""
    worker = min(workers, key=lambda worker: worker.num_blocks)
    tokens = worker.num_blocks * worker.block_size
    if tokens >= max_model_len:
        return
    blocks = -(-max_model_len // worker.block_size)
    needed = blocks * worker.block_size * layout.kv_bytes_per_token
    raise CapacityError(
        f"one sequence of max_model_len {max_model_len} tokens takes {needed / 2**30:.3g} GiB of KV cache, and an "
        f"R-worker has {tokens * layout.kv_bytes_per_token / 2**30:.3g} GiB: give at least --kv-cache-memory "
        f"{-(-needed // 2**20)}MiB, or at most --max-model-len {tokens}"
    )
