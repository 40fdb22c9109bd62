"""Advances recurrent layers' states by the rows of a prompt's part, by R-workers' kernels on a prefill worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fastdecode.core.types import SpanMode
from fastdecode.kinds import Dense, Recurrent
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.part.attention import SEQUENCE_ID, LayerCache, MakeCache, release, step_of
from fastdecode.sworker.run.staging import from_numpy, to_numpy

FILLER = Dense(num_heads=1, num_kv_heads=1, key_head_dim=64, value_head_dim=64, scale=1.0, window=1)
"""An attending layer added to a cache whose only other layer is recurrent. Its blocks hold the state."""


class PartStates:
    """R-worker caches for single recurrent layers; each holds one layer's state of one prompt at a time."""

    def __init__(self, layout: KVLayout, make_cache: MakeCache) -> None:
        """``layout``: the model's, with the R-workers' KV dtype and arithmetic."""
        self.layout = layout
        self._make_cache = make_cache
        self._caches: dict[Recurrent, LayerCache] = {}

    def advance(
        self, layer: int, rows: torch.Tensor, before: np.ndarray | None, start: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return (o [rows, heads, value_dim] for payload ``rows`` [rows, 1, elements], the state after these rows).

        ``before``: the state after the ``start`` earlier tokens, uint8 [bytes] in the R-workers' form; None if there
        are none.
        """
        spec = self.layout.layers[layer]
        if not isinstance(spec, Recurrent):
            raise TypeError(f"layer {layer} is {spec.kind}, and has no state to advance")
        cache, context_len = self._cache(spec), 0
        try:
            if before is not None:
                context_len = _alike(start, spec)
                filler = np.zeros(context_len * FILLER.token_bytes(self.layout.kv_dtype), np.uint8)
                cache.import_(SEQUENCE_ID, context_len, np.concatenate([filler, before]))
            o = _step(cache, context_len, to_numpy(rows.cpu()), spec.row_shapes[3])
            state = cache.export(SEQUENCE_ID, context_len + len(rows), 0)
            return from_numpy(o, rows.dtype).to(rows.device), state
        finally:
            release(cache)

    def close(self) -> None:
        """Free all caches; may be called twice."""
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()

    def _cache(self, spec: Recurrent) -> LayerCache:
        if spec not in self._caches:
            self._caches[spec] = self._make_cache(replace(self.layout, layers=(FILLER, spec), kv_port=""))
        return self._caches[spec]


def _alike(start: int, state: Recurrent) -> int:
    """Return the smallest position at which a convolution's window has its taps in the same order as at ``start``."""
    period = max(state.taps - 1, 1)
    return start if start < period else period + start % period


def _step(cache: LayerCache, context_len: int, rows: np.ndarray, output: tuple[int, int]) -> np.ndarray:
    o, none = np.empty((len(rows), *output), rows.dtype), np.empty((len(rows), 1, 0), rows.dtype)
    filler = np.zeros((len(rows), 1, FILLER.key_head_dim), rows.dtype)
    with step_of(cache, SpanMode.ATTEND, context_len, len(rows)):
        cache.run(0, 0, filler, filler, filler, np.empty_like(filler))
        cache.run(0, 1, none, np.ascontiguousarray(rows), none, o)
    return o
