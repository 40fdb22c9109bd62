"""Caches in the S-worker's process: for a draft model, for prompts in progress, and for one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.core.machine import DRAFT_CACHE_SHARE, available_memory_bytes, usable_cores
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import RWorkerInfo
from fastdecode.kinds.layout import KVLayout


def make_draft_backend(config: EngineConfig, layout: KVLayout, max_model_len: int) -> AttentionBackend:
    """Return an R-worker for a draft model with KV cache ``layout``, in this process and on the S-worker's cores."""
    from fastdecode.cluster.pool.inproc import InprocBackend
    from fastdecode.cluster.r_worker.host import RWorkerSize

    cores = config.s_core_list or usable_cores()
    sequence_bytes = (-(-max_model_len // config.block_size) + 1) * config.block_size * layout.room_bytes_per_token
    most = config.bytes_of("kv_cache_memory") or int(available_memory_bytes() * DRAFT_CACHE_SHARE)
    num_bytes = max(sequence_bytes, min(config.max_num_seqs * sequence_bytes, most))
    return InprocBackend([RWorkerSize(num_bytes, config.s_thread_count, tuple(cores))], config.block_size)


def make_prompt_backend(
    config: EngineConfig, layout: KVLayout, num_tokens: int, r_workers: Sequence[RWorkerInfo]
) -> AttentionBackend:
    """Return an open R-worker in this process for ``num_tokens`` tokens of prompts in progress.
    It runs on the S-worker's cores, with the instruction set of all ``r_workers`` if this processor has it. So results
    do not depend on whether a prompt attends here or on an R-worker.
    """
    from fastdecode.cluster.pool.inproc import InprocBackend
    from fastdecode.cluster.r_worker.host import RWorkerSize, block_bytes, has_isa

    cores = config.s_core_list or usable_cores()
    # one block more per prompt, since its last block may be partly empty
    num_blocks = -(-num_tokens // config.block_size) + config.max_num_seqs
    num_bytes = num_blocks * block_bytes(layout, config.block_size) + layout.weight_bytes
    backend = InprocBackend([RWorkerSize(num_bytes, config.s_thread_count, tuple(cores))], config.block_size)
    isa = common_isa(r_workers)
    backend.open(replace(layout, isa=isa if has_isa(isa) else "auto", kv_port=""))
    return backend


def layer_cache_maker(config: EngineConfig, num_tokens: int) -> Callable[[KVLayout], Any]:
    """Return a function that makes a one-layer cache (``_rworker.RWorker``) for a sequence of ``num_tokens`` tokens.
    The cache computes with the S-worker's threads.
    """
    from fastdecode.cluster.r_worker.host import make_layer_cache

    cores = tuple(config.s_core_list or usable_cores())
    return lambda layout: make_layer_cache(layout, num_tokens, config.s_thread_count, cores)


def common_isa(r_workers: Sequence[RWorkerInfo]) -> str:
    """Return the instruction set that all of ``r_workers`` use; "auto" if they differ."""
    isa, *others = {worker.isa for worker in r_workers}
    return "auto" if others else isa
