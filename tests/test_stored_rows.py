"""Rows that torch attends as R-workers' caches store them: the same bits, and nearly the same attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.r_worker.host import RWorkerSize, block_bytes, make_rworker
from fastdecode.core.remote_prefill import PromptKV
from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.kinds import Dense, Index, Latent
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.part.attention import LayerCaches, Rows, TorchAttention
from fastdecode.sworker.run.prompt_scratch import PromptScratch
from fastdecode.sworker.run.prompts import PromptCache, reference_attention
from fastdecode.sworker.run.staging import TORCH_DTYPE, pack, to_numpy
from fastdecode.sworker.run.stored_rows import as_stored

NUM_ROWS = 40
LAYERS = {
    "64": Dense(4, 2, 64, 64, 0.125),
    "24, 80": Dense(4, 2, 24, 80, 0.2),
    "96, 130": Dense(2, 1, 96, 130, 0.1),
    "latents": Latent(4, 1, 40, 24, 0.15),
    "long latents": Latent(4, 1, 576, 512, 0.05),
}
CACHES = ("float16", "bfloat16", "int8", "int4")


def rows_of(layer: Any, dtype: str = "float32") -> list[torch.Tensor]:
    """Return q, k and v; some keys are zeros, equal or large, and all values lie off zero."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(NUM_ROWS, *shape, generator=generator) for shape in layer.row_shapes[:3])
    k[3], k[4], k[5, ..., 1], v = 0.0, 1.75, 30.0, v - 0.4
    return [each.to(TORCH_DTYPE[dtype]) for each in (q, k, v)]


def no_prefix(layer: Any, kv_dtype: str) -> np.ndarray:
    return np.zeros((0, layer.token_bytes(kv_dtype)), np.uint8)


def make_cache(of_layer: KVLayout) -> Any:
    return make_rworker(of_layer, 16, RWorkerSize(block_bytes(of_layer, 16) * 8, 1))


def by_r_worker(layout: KVLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return o of a prompt that an R-worker attends."""
    backend = InprocBackend([RWorkerSize(1 << 22, 1)], 16)
    backend.open(layout)
    cache = PromptCache(backend)
    mini_batch = MiniBatch.of([Chunk(0, 0, 0, [0] * len(q), False, False, True, False)])
    cache.begin_step([mini_batch])
    (o,) = cache.attend(0, 0, q, k, v, pack(mini_batch, torch.device("cpu")).prompt_rows)
    o = o.clone()
    cache.end_step()
    backend.close()
    return o


@pytest.mark.parametrize("kv_dtype", CACHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_bits_are_the_caches(name: str, dtype: str, kv_dtype: str) -> None:
    layer = LAYERS[name]
    q, k, v = rows_of(layer, dtype)
    caches = LayerCaches(KVLayout((layer,), dtype, kv_dtype), make_cache)
    rows = [Rows(0, to_numpy(q[:0]), PromptKV(no_prefix(layer, kv_dtype), to_numpy(k), to_numpy(v)))]
    held = caches.filled(rows, NUM_ROWS).read_tokens(0, 0)
    caches.close()
    for theirs, ours in zip(held, as_stored(k, v, layer, kv_dtype), strict=True):
        assert ours.dtype == k.dtype
        assert not ours.numel() or torch.equal(torch.from_numpy(theirs).to(k.dtype), ours)


def test_an_index_keeps_16_bits() -> None:
    """Quantized caches keep the keys of an index as bfloat16."""
    layer = Index(2, 32, 8, 1.0)
    _, k, v = rows_of(layer)
    assert torch.equal(as_stored(k, v, layer, "int4")[0], k.bfloat16().float())
    assert torch.equal(as_stored(k, v, layer, "float16")[0], k.half().float())


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_rows_that_are_not_finite_become_nan(kv_dtype: str) -> None:
    layer = LAYERS["64"]
    _, k, v = rows_of(layer)
    k[7, 1, 9], v[8, 0, 2] = torch.inf, torch.nan
    keys, values = as_stored(k, v, layer, kv_dtype)
    assert keys[7, 1].isnan().all() and values[8, 0].isnan().all()
    assert keys.isnan().sum() == values.isnan().sum() == 64


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 2e-3), ("int4", 1e-2)])
@pytest.mark.parametrize("name", ["64", "latents"])
def test_torch_attends_as_r_workers_do(name: str, kv_dtype: str, most: float) -> None:
    """R-workers round queries and weights too, which errs far less than rounded keys and values do."""
    layer = LAYERS[name]
    layout = KVLayout((layer,), "float32", kv_dtype)
    q, k, v = rows_of(layer)
    wanted = by_r_worker(layout, q, k, v)
    chunks = [Chunk(0, 0, a, [0] * (b - a), False, False, b == NUM_ROWS, False) for a, b in ((0, 9), (9, NUM_ROWS))]
    scratch, found = PromptScratch(layout), []
    for each in chunks:
        rows, mine = pack(MiniBatch.of([each]), torch.device("cpu")).prompt_rows, slice(each.context_len, None)
        found += scratch.attend(0, 0, q[mine], k[mine], v[mine], rows)
    kv = PromptKV(no_prefix(layer, kv_dtype), to_numpy(k), to_numpy(v))
    in_part = TorchAttention(layout, make_cache).attend(0, q, kv, 0)
    unrounded = _distance(reference_attention(q, k, v, layer), wanted)
    for o in (torch.cat(found), in_part):
        assert _distance(o, wanted) < min(most, unrounded / 3)


def _distance(o: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((o - wanted).norm() / wanted.norm())
