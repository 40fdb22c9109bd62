"""How the rows of a prompt's part attend on a prefill worker: to the keys and values before them, and to their own.

On a CPU an R-worker's own kernels compute it, over keys and values as the R-workers' caches store them: a token gets
the bits there that the S-worker or an R-worker would give it (``PromptCache``). On a GPU torch's attention does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from fastdecode.core.remote_prefill import PromptKV
from fastdecode.core.types import KVLayout, LayerLayout, SpanMode, Verb
from fastdecode.sworker.prompts import Sight, causal_mask, prompt_attention, rows_by_head, values_of
from fastdecode.sworker.staging import TORCH_DTYPE, from_numpy, to_numpy

TIMED_ROWS = 512
"""Rows of the attention that is timed, over as many keys before them."""

SEQUENCE_ID = 0
"""Number of the one sequence that a layer's cache holds at a time."""


class LayerCache(Protocol):
    """The part of ``_rworker.RWorker``, which says more, that one layer uses."""

    def begin_step(self, controls: np.ndarray, mini_batches: list[np.ndarray]) -> None:
        """Begin a step: int64 CONTROL [n, 4], and SPAN [m, 4] of each mini-batch."""

    def run(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """Store ``k`` and ``v``, and attend ``q``, into ``out``."""

    def end_step(self) -> object:
        """Commit what was stored."""

    def abandon_step(self) -> None:
        """Forget what was stored."""

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """A new sequence from stored bits."""

    def read_tokens(self, sequence_id: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as float32 [tokens, num_kv_heads, …]."""

    def sequence_ids(self) -> list[int]:
        """Sequences that it holds."""

    def close(self) -> None:
        """Free everything; may be called twice."""


MakeCache = Callable[[KVLayout], LayerCache]
"""Makes a cache for the one layer of a layout, which holds the longest prompt, with threads that attend to it."""


class PartAttention(Protocol):
    """Attends the rows of one part of a prompt, layer by layer."""

    def attend(self, layer: int, q: torch.Tensor, kv: PromptKV, start: int) -> torch.Tensor:
        """o [rows, num_heads, value_head_dim] of the rows ``q`` [rows, num_heads, key_head_dim].

        These are at positions ``start`` and on; ``kv`` has their own keys and values, and may reach beyond them.
        """

    def close(self) -> None:
        """Free everything; may be called twice."""


class LayerCaches:
    """A cache for each kind of layer, which holds one layer of one prompt at a time.

    Nothing of a layer is needed once its rows have attended, so that this takes a layer's keys and values, not a
    model's. Layers alike, as most models' all are, share one.
    """

    def __init__(self, layout: KVLayout, make_cache: MakeCache) -> None:
        """``layout``: with the dtype of the R-workers' caches, and their arithmetic."""
        self.layout = layout
        self._make_cache = make_cache
        self._caches: dict[LayerLayout, LayerCache] = {}

    def filled(self, layer: int, kv: PromptKV, num_tokens: int) -> LayerCache:
        """The cache of ``layer`` with the first ``num_tokens`` of ``kv``, as R-workers would store them."""
        shape = self.layout.layers[layer]
        if shape not in self._caches:
            self._caches[shape] = self._make_cache(replace(self.layout, layers=(shape,), kv_port=""))
        cache, context_len = self._caches[shape], len(kv.prefix)
        if context_len:
            cache.import_(SEQUENCE_ID, context_len, kv.prefix.reshape(-1))
        if num_tokens > context_len:
            rows = slice(0, num_tokens - context_len)
            queries = np.empty((0, shape.num_heads, shape.key_head_dim), kv.k.dtype)
            _step(cache, SpanMode.APPEND, context_len, queries, kv.k[rows], kv.v[rows], shape.value_head_dim)
        return cache

    def attend(self, layer: int, q: np.ndarray, kv: PromptKV, start: int) -> np.ndarray:
        """o of the rows ``q`` at positions ``start`` and on, as ``PartAttention.attend``, as numpy carries them."""
        own = slice(start - len(kv.prefix), start - len(kv.prefix) + len(q))
        try:
            cache, value_dim = self.filled(layer, kv, start), self.layout.layers[layer].value_head_dim
            return _step(cache, SpanMode.ATTEND, start, q, kv.k[own], kv.v[own], value_dim)
        finally:
            self.clear(layer)

    def clear(self, layer: int) -> None:
        """The cache of ``layer`` holds nothing any more."""
        cache = self._caches.get(self.layout.layers[layer])
        if cache and cache.sequence_ids():
            cache.begin_step(np.array([[Verb.RELEASE, SEQUENCE_ID, 0, 0]], np.int64), [])
            cache.end_step()

    def close(self) -> None:
        """Free all caches; may be called twice."""
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()


def _step(
    cache: LayerCache, mode: SpanMode, start: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, value_dim: int
) -> np.ndarray:
    """Store rows from token ``start`` on, and have those with queries attend; their o."""
    o = np.empty((len(q), q.shape[1], value_dim), q.dtype)
    cache.begin_step(np.zeros((0, 4), np.int64), [np.array([[SEQUENCE_ID, start, len(k), mode]], np.int64)])
    try:
        cache.run(0, 0, q, k, v, o)
    except BaseException:
        cache.abandon_step()
        raise
    cache.end_step()
    return o


class StoredAttention:
    """``PartAttention`` by an R-worker's kernels, over keys and values as R-workers' caches store them."""

    def __init__(self, layout: KVLayout, make_cache: MakeCache) -> None:
        self._caches = LayerCaches(layout, make_cache)

    def attend(self, layer: int, q: torch.Tensor, kv: PromptKV, start: int) -> torch.Tensor:
        return from_numpy(self._caches.attend(layer, to_numpy(q), kv, start), q.dtype)

    def close(self) -> None:
        self._caches.close()


class TorchAttention:
    """``PartAttention`` by torch, where the model is: over keys and values as they are before they are stored.

    Those of a prefix are read as an R-worker's cache has them, and rounded to the model's dtype.
    """

    def __init__(self, layout: KVLayout, make_cache: MakeCache) -> None:
        self._caches = LayerCaches(layout, make_cache)

    def attend(self, layer: int, q: torch.Tensor, kv: PromptKV, start: int) -> torch.Tensor:
        keys, values = (from_numpy(each, q.dtype).to(q.device) for each in (kv.k, kv.v))
        if len(kv.prefix):
            before = (torch.from_numpy(each).to(q.device, q.dtype) for each in self._prefix(layer, kv))
            keys, values = (torch.cat(pair) for pair in zip(before, (keys, values), strict=True))
        return part_attention(q, keys, values, self._caches.layout.layers[layer], start)

    def _prefix(self, layer: int, kv: PromptKV) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the prefix, float32 [context_len, num_kv_heads, …]."""
        try:
            return self._caches.filled(layer, kv, len(kv.prefix)).read_tokens(SEQUENCE_ID, 0)
        finally:
            self._caches.clear(layer)

    def close(self) -> None:
        self._caches.close()


def part_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerLayout, start: int) -> torch.Tensor:
    """Rows ``q`` at positions ``start`` and on attend to ``k`` and ``v``, which may reach beyond them.

    Where they do (tensor/sequence parallel), all keys are multiplied and the later ones masked: such code takes no
    advantage of causality (KV-Runahead, section 4.1).
    """
    end, v = start + len(q), values_of(k, v, layer)
    plain = not (layer.soft_cap or layer.sinks or layer.window or layer.alibi_slopes)
    if end == len(k) or not plain:
        return prompt_attention(q, k[:end], v[:end], layer)
    mask = F.pad(causal_mask(len(q), end, Sight(), q.device), (0, len(k) - end))
    queries, keys, values = (rows_by_head(rows, layer) for rows in (q, k, v))
    o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
    return o[0].transpose(0, 1)


def attention_pair_seconds(attention: PartAttention, layout: KVLayout, device: torch.device) -> float:
    """Seconds of the first layer's prompt attention for each query and key that are multiplied: the faster of two."""
    layer, dtype = layout.layers[0], TORCH_DTYPE[layout.model_dtype]
    q = torch.ones((TIMED_ROWS, layer.num_heads, layer.key_head_dim), dtype=dtype, device=device)
    k, v = (
        to_numpy(torch.ones((2 * TIMED_ROWS, layer.num_kv_heads, dim), dtype=dtype))
        for dim in (layer.key_head_dim, layer.stored_value_dim)
    )
    kv = PromptKV(np.zeros((0, layer.kv_bytes_per_token(layout.kv_dtype)), np.uint8), k, v)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.inference_mode():
            attention.attend(0, q, kv, TIMED_ROWS).sum().item()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / (TIMED_ROWS * 1.5 * TIMED_ROWS)
