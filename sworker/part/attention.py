"""Attention of one part of a prompt on a prefill worker, over the keys and values of earlier rows and its own.

On a CPU the R-workers' kernels compute it, from keys and values in the form of the R-workers' caches. So a token gets
the same bits as on the S-worker (``PromptCache``) or on an R-worker. On a GPU torch's attention computes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from fastdecode.core.remote_prefill import PromptKV
from fastdecode.core.types import SpanMode, Verb
from fastdecode.kinds import Index, Layer
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.adapters.index import picked
from fastdecode.sworker.run.prompts import (
    Sight,
    causal_mask,
    prompt_attention,
    reference_attention,
    rows_by_head,
    values_of,
)
from fastdecode.sworker.run.staging import TORCH_DTYPE, from_numpy, to_numpy
from fastdecode.sworker.run.stored_rows import as_stored

TIMED_ROWS = 512
"""Number of rows of the timed attention; they attend to as many earlier keys."""

SEQUENCE_ID = 0
"""The id of the sequence in a layer's cache, which holds one sequence at a time."""


class LayerCache(Protocol):
    """The methods of the C++ class ``_rworker.RWorker`` that this module calls."""

    def begin_step(self, controls: np.ndarray, mini_batches: list[np.ndarray]) -> None:
        """Begin a step: int64 CONTROL [n, 4], and SPAN [m, 4] of each mini-batch."""

    def run(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """Store ``k`` and ``v``, and attend ``q`` into ``out``."""

    def end_step(self) -> object:
        """Commit the rows that the open step has stored."""

    def abandon_step(self) -> None:
        """Drop the rows that the open step has stored."""

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """Make a new sequence of ``num_tokens`` tokens from ``data``, the cache's bytes."""

    def read_tokens(self, sequence_id: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and the values of all tokens, each float32 [tokens, num_kv_heads, …]."""

    def export(self, sequence_id: int, start: int, num_tokens: int) -> np.ndarray:
        """Return the cache's bytes of the tokens, and recurrent states if the sequence ends with these tokens."""

    def sequence_ids(self) -> list[int]:
        """Return the ids of the cache's sequences."""

    def close(self) -> None:
        """Free all memory; may be called twice."""


MakeCache = Callable[[KVLayout], LayerCache]
"""A function that makes a cache for a layout of few layers. The cache holds the longest prompt; it has own threads."""


class Rows(NamedTuple):
    """The rows of one part of a prompt in one layer: queries ``q`` [rows, num_heads, query_dim], and keys and values.

    ``kv`` also has the keys and values of earlier rows.
    """

    layer: int
    q: np.ndarray
    kv: PromptKV


class PartAttention(Protocol):
    """The interface that computes attention for one part of a prompt, layer by layer."""

    def attend(self, layer: int, q: torch.Tensor, kv: PromptKV, start: int) -> torch.Tensor:
        """Return o [rows, num_heads, value_head_dim] of the rows ``q`` [rows, num_heads, query_dim].

        ``start``: position of the first row. ``kv``: keys and values up to the last row's position, or further. For an
        index layer, o is zeros: the index picks when the next layers attend.
        """

    def close(self) -> None:
        """Free all memory; may be called twice."""


class LayerCaches:
    """R-worker caches for single layers; each holds one layer of one prompt at a time.

    After a layer's rows have attended, its data is dropped, so memory for one layer suffices. Layers with equal
    descriptions share a cache; in most models all layers do. A layer whose tokens an index picks shares its cache with
    the index, which picks again for each such layer.
    """

    def __init__(self, layout: KVLayout, make_cache: MakeCache) -> None:
        """``layout``: the model's, with the R-workers' KV dtype and arithmetic."""
        self.layout = layout
        self._make_cache = make_cache
        self._caches: dict[tuple[Layer, ...], LayerCache] = {}

    def filled(self, rows: Sequence[Rows], num_tokens: int) -> LayerCache:
        """Return the cache for the layers of ``rows``, filled with the prompt's first ``num_tokens`` tokens."""
        shapes = self._shapes(rows)
        if shapes not in self._caches:
            self._caches[shapes] = self._make_cache(replace(self.layout, layers=shapes, kv_port=""))
        cache, context_len = self._caches[shapes], len(rows[0].kv.prefix)
        if context_len:
            cache.import_(SEQUENCE_ID, context_len, np.concatenate([each.kv.prefix.reshape(-1) for each in rows]))
        if num_tokens > context_len:
            none = [each._replace(q=each.q[:0]) for each in rows]
            _step(cache, SpanMode.APPEND, shapes, none, slice(0, num_tokens - context_len))
        return cache

    def attend(self, rows: Sequence[Rows], start: int) -> np.ndarray:
        """Return o of the last layer in ``rows``; the rows' positions begin at ``start``."""
        first = start - len(rows[0].kv.prefix)
        try:
            cache = self.filled(rows, start)
            return _step(cache, SpanMode.ATTEND, self._shapes(rows), rows, slice(first, first + len(rows[0].q)))
        finally:
            self.clear(rows)

    def clear(self, rows: Sequence[Rows]) -> None:
        """Empty the cache for the layers of ``rows``."""
        if cache := self._caches.get(self._shapes(rows)):
            release(cache)

    def close(self) -> None:
        """Free all caches; may be called twice."""
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()

    def _shapes(self, rows: Sequence[Rows]) -> tuple[Layer, ...]:
        """Return the layers of ``rows``, an index first, described as the only layers of a cache."""
        *index, last = (self.layout.layers[each.layer] for each in rows)
        return (*index, last.reading(0 if index else -1))


@contextmanager
def step_of(cache: LayerCache, mode: SpanMode, start: int, num_rows: int) -> Iterator[None]:
    """Within the context, keep a step of ``num_rows`` rows from position ``start`` open; on an error, abandon it."""
    span = [SEQUENCE_ID, start, num_rows, mode]
    cache.begin_step(np.zeros((0, 4), np.int64), [np.array([span], np.int64)])
    try:
        yield
    except BaseException:
        cache.abandon_step()
        raise
    cache.end_step()


def release(cache: LayerCache) -> None:
    """Free all sequences in ``cache``."""
    if cache.sequence_ids():
        cache.begin_step(np.array([[Verb.RELEASE, SEQUENCE_ID, 0, 0]], np.int64), [])
        cache.end_step()


def _step(
    cache: LayerCache, mode: SpanMode, shapes: Sequence[Layer], rows: Sequence[Rows], tokens: slice
) -> np.ndarray:
    """Store the keys and values of positions ``tokens``, and attend the rows ``q``; return o of the last layer.

    ``rows``: those of one layer, or those of an index and of the layer whose tokens it picks.
    """
    first = len(rows[0].kv.prefix) + tokens.start
    with step_of(cache, mode, first, tokens.stop - tokens.start):
        for number, (shape, each) in enumerate(zip(shapes, rows, strict=True)):
            o = np.empty((len(each.q), *shape.row_shapes[3]), each.q.dtype)
            cache.run(0, number, each.q, each.kv.k[tokens], each.kv.v[tokens], o)
    return o


class StoredAttention:
    """A ``PartAttention`` by an R-worker's kernels, over keys and values in the form of R-workers' caches."""

    def __init__(self, layout: KVLayout, make_cache: MakeCache) -> None:
        self._caches = LayerCaches(layout, make_cache)
        self._index: Rows | None = None

    def attend(self, layer: int, q: torch.Tensor, kv: PromptKV, start: int) -> torch.Tensor:
        shape, rows = self._caches.layout.layers[layer], Rows(layer, to_numpy(q), kv)
        # an index only stores its keys here; it picks tokens when the layers that use them attend
        if shape.ranks_tokens:
            self._index = rows
            return q.new_zeros((len(q), *shape.row_shapes[3]))
        own = [self._index, rows] if shape.reads >= 0 and self._index else [rows]
        return from_numpy(self._caches.attend(own, start), q.dtype)

    def close(self) -> None:
        self._index = None
        self._caches.close()


class TorchAttention:
    """A ``PartAttention`` by torch on the model's device.

    Keys and values of a cached prefix are decoded from the R-workers' form and rounded to the model's dtype.
    """

    def __init__(self, layout: KVLayout, make_cache: MakeCache) -> None:
        self._caches = LayerCaches(layout, make_cache)
        self._picked: torch.Tensor | None = None

    def attend(self, layer: int, q: torch.Tensor, kv: PromptKV, start: int) -> torch.Tensor:
        shape, end = self._caches.layout.layers[layer], start + len(q)
        keys, values = (from_numpy(each, q.dtype).to(q.device) for each in (kv.k, kv.v))
        if self._caches.layout.kv_dtype != self._caches.layout.model_dtype:
            keys, values = as_stored(keys, values, shape, self._caches.layout.kv_dtype)
        if len(kv.prefix):
            before = (torch.from_numpy(each).to(q.device, q.dtype) for each in self._prefix(layer, kv))
            keys, values = (torch.cat(pair) for pair in zip(before, (keys, values), strict=True))
        if isinstance(shape, Index):  # remember which tokens the index picks, for the layers that come next
            self._picked = picked(q, keys[:end], shape)
            return q.new_zeros((len(q), *shape.row_shapes[3]))
        if not isinstance(shape, Attending):
            raise TypeError(f"layer {layer} is {shape.kind}, which prompt attention does not compute")
        if shape.reads >= 0:
            return reference_attention(q, keys[:end], values[:end], shape, self._picked)
        return part_attention(q, keys, values, shape, start)

    def _prefix(self, layer: int, kv: PromptKV) -> tuple[np.ndarray, np.ndarray]:
        shape = self._caches.layout.layers[layer]
        rows = [Rows(layer, np.empty((0, *shape.row_shapes[0]), kv.k.dtype), kv)]
        try:
            return self._caches.filled(rows, len(kv.prefix)).read_tokens(SEQUENCE_ID, 0)
        finally:
            self._caches.clear(rows)

    def close(self) -> None:
        self._picked = None
        self._caches.close()


def part_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Attending, start: int) -> torch.Tensor:
    """Return o for the rows ``q``, which begin at position ``start``, over the keys ``k`` and values ``v``.

    ``k`` and ``v`` may go beyond the last row: tensor/sequence parallel prefill has all keys of the prompt. Then all
    are multiplied, and later ones masked, since such code cannot use causality (KV-Runahead, section 4.1).
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
    """Return the seconds that prompt attention takes per layer and pair of query and key, the faster of two trials.

    The first layer that attends is timed, together with an index before it; the result is the mean of both.
    """
    numbered = list(enumerate(layout.layers))
    first = next(number for number, layer in numbered if layer.caches_rows)
    timed = range(first, next(number for number, layer in numbered if layer.caches_rows and not layer.ranks_tokens) + 1)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.inference_mode():
            for number in timed:
                _attend_ones(attention, layout, number, device)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / len(timed) / (TIMED_ROWS * 1.5 * TIMED_ROWS)


def _attend_ones(attention: PartAttention, layout: KVLayout, number: int, device: torch.device) -> None:
    layer, dtype = layout.layers[number], TORCH_DTYPE[layout.model_dtype]
    q, k, v = (torch.ones((TIMED_ROWS, *shape), dtype=dtype) for shape in layer.row_shapes[:3])
    keys, values = (to_numpy(torch.cat((each, each))) for each in (k, v))
    kv = PromptKV(np.zeros((0, layer.token_bytes(layout.kv_dtype)), np.uint8), keys, values)
    attention.attend(number, q.to(device), kv, TIMED_ROWS).sum().item()
