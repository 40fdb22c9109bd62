"""An R-worker of this process, made for a layout: the C++ object and the shapes it is called with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.tuning import tuning
from fastdecode.errors import BackendError, CapacityError
from fastdecode.types import KVLayout, LayerLayout, WorkerPlan


@dataclass(frozen=True)
class RWorkerSize:
    """Memory and threads of one R-worker; thread i is pinned to ``cores[i % len(cores)]`` (empty: unpinned)."""

    kv_cache_bytes: int
    num_threads: int
    cores: tuple[int, ...] = ()


@cache
def check_isa(isa: str) -> None:
    """BackendError if this machine or build gets an instruction set wrong; found out once per process, in 10 ms."""
    refusal = _rworker.self_test(isa)
    if refusal:
        raise BackendError(refusal)


def make_rworker(layout: KVLayout, block_size: int, size: RWorkerSize) -> _rworker.RWorker:
    """A cache of as many blocks as fit; CapacityError if not even one does, ValueError for an impossible layout.

    BackendError, as ``check_isa``, for kernels that do not compute what they should.
    """
    tuned = tuning()
    forced = os.environ.get("FASTDECODE_ISA") or layout.isa
    if "auto" not in (forced, layout.isa) and forced != layout.isa:
        raise ValueError(f"the S-worker asks for {layout.isa} arithmetic, and FASTDECODE_ISA is {forced} here")
    layers = [_layer_tuple(layer) for layer in layout.layers]
    block_bytes = _rworker.block_bytes(layers, layout.kv_dtype, block_size)
    num_blocks = size.kv_cache_bytes // block_bytes
    if num_blocks < 1:
        raise CapacityError(
            f"a KV cache of {size.kv_cache_bytes:,} bytes per R-worker holds not even one block of "
            f"{block_size} tokens, which takes {block_bytes:,} bytes; give more --kv-cache-memory"
        )
    worker = _rworker.RWorker(
        layers=layers,
        model_dtype=layout.model_dtype,
        kv_dtype=layout.kv_dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        num_threads=size.num_threads,
        cores=list(size.cores),
        isa=tuned.isa if layout.isa == "auto" else layout.isa,
        streams=tuned.streams,
    )
    check_isa(worker.isa)
    return worker


def begin_step(worker: _rworker.RWorker, plan: WorkerPlan) -> None:
    """Hand ``plan`` to ``worker``; ValueError or KeyError if it is impossible."""
    worker.begin_step(_columns(plan.controls), [_columns(spans) for spans in plan.mini_batches])


def row_counts(spans: np.ndarray) -> tuple[int, int]:
    """Attending rows and all rows of one worker's SPAN [num_spans] in a mini-batch."""
    return int(spans["num_rows"][spans["attends"] != 0].sum()), int(spans["num_rows"].sum())


def slices(counts: Sequence[int]) -> tuple[slice, ...]:
    """Consecutive slices of these lengths."""
    ends = accumulate(counts, initial=0)
    return tuple(slice(start, end) for start, end in pairwise(ends))


def _layer_tuple(layer: LayerLayout) -> tuple:
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.key_head_dim,
        layer.value_head_dim,
        layer.scale,
        layer.window,
        layer.soft_cap,
        list(layer.sinks),
    )


def _columns(records: np.ndarray) -> np.ndarray:
    """Records of four int64 fields as int64 [n, 4]."""
    return np.ascontiguousarray(records).view(np.int64).reshape(-1, 4)
