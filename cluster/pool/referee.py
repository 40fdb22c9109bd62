"""Computes audited rows again on the S-worker's host, to check an R-worker or decide between two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.pool.audited_rows import AuditedRow
from fastdecode.cluster.r_worker.host import begin_step, make_layer_cache
from fastdecode.core.types import CONTROL, Verb, WorkerPlan
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout


class Referee:
    """Attends audited rows over exported keys and values, with the R-workers' kernels and arithmetic.
    It keeps one small cache per kind of layer, and one sequence at a time.
    """

    def __init__(self, layout: KVLayout, isa: str) -> None:
        """``isa``: the R-workers' instruction set, which this process must have too."""
        self._layout = replace(layout, isa=isa, kv_port="", weights={})
        self._caches: dict[Layer, tuple[int, _rworker.RWorker]] = {}

    def attend(self, row: AuditedRow, rows: np.ndarray) -> np.ndarray:
        """Return the answer for ``row``, uint8 [num_bytes], from the keys and values ``rows`` of its layer, uint8."""
        asked = row.question
        if row.query is None:
            raise ValueError("the row's query was not kept")
        cache = self._cache(self._layout.layers[asked.layer], asked.num_tokens)
        cache.import_(0, asked.num_tokens, rows)
        try:
            return cache.attend_again(0, 0, asked.position, int(asked.mode), row.query).reshape(-1).view(np.uint8)
        finally:
            release = np.array([(Verb.RELEASE, 0, 0, 0)], CONTROL)
            begin_step(cache, WorkerPlan(release, ()))
            cache.end_step()

    def close(self) -> None:
        """Free the caches; may be called twice."""
        for _, cache in self._caches.values():
            cache.close()
        self._caches.clear()

    def _cache(self, layer: Layer, num_tokens: int) -> _rworker.RWorker:
        """Return a cache for ``num_tokens`` tokens of one layer like ``layer``."""
        room, cache = self._caches.get(layer, (0, None))
        if cache is None or room < num_tokens:
            if cache:
                cache.close()
            room = 1 << max(num_tokens - 1, 1023).bit_length()
            cache = make_layer_cache(replace(self._layout, layers=(layer,)), room, 1, ())
            self._caches[layer] = room, cache
        return cache
