"""Computes audited rows again on the S-worker's host, to check an R-worker or decide between two."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.pool.audited_rows import AuditedRow
from fastdecode.cluster.r_worker.host import begin_step, block_bytes, make_layer_cache
from fastdecode.core.auditing import AuditMode
from fastdecode.core.dtypes import WIRE_DTYPE, from_wire
from fastdecode.core.types import CONTROL, Verb, WorkerPlan
from fastdecode.kinds import Layer
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.layout import KVLayout


class Referee:
    """Attends audited rows over exported keys and values, with the R-workers' kernels and arithmetic.
    It keeps one small cache per kind of layer, and one sequence at a time.
    """

    def __init__(self, layout: KVLayout, isa: str, block_size: int) -> None:
        """``isa``: the R-workers' instruction set, which this process must have too. ``block_size``: of R-workers."""
        self._layout, self._block_size = replace(layout, isa=isa, kv_port="", weights={}), block_size
        self._modes = [self._mode_for(layer) for layer in layout.layers]
        self._caches: dict[Layer, tuple[int, _rworker.RWorker]] = {}

    def mode(self, layer: int) -> AuditMode:
        """Return the mode in which R-workers return keys and values of ``layer`` fastest: BLOCKS if possible, or ROWS.

        Rows pass through a conversion on both sides, which takes ten times as long as attention over them.
        """
        return self._modes[layer]

    def attend(self, row: AuditedRow, rows: np.ndarray, mode: AuditMode = AuditMode.ROWS) -> np.ndarray:
        """Return the answer for ``row``, uint8 [num_bytes], from the keys and values ``rows`` of its layer, uint8.

        ``mode``: the mode in which the R-worker returned ``rows``.
        """
        return self._attend(row, self._layout.layers[row.question.layer], rows, mode)

    def _attend(self, row: AuditedRow, layer: Layer, rows: np.ndarray, mode: AuditMode) -> np.ndarray:
        """Return the answer for ``row`` in a layer like ``layer``, uint8 [num_bytes]."""
        asked = row.question
        if row.query is None:
            raise ValueError("the row's query was not kept")
        cache = self._cache(layer, asked.num_tokens)
        num_full = asked.num_tokens // self._block_size * self._block_size if mode is AuditMode.BLOCKS else 0
        num_bytes = num_full * len(rows) // asked.num_tokens
        try:
            if num_full:
                cache.import_blocks(0, num_full, rows[:num_bytes])
            if num_full < asked.num_tokens:
                cache.import_(0, asked.num_tokens - num_full, rows[num_bytes:], num_full)
            return cache.attend_again(0, 0, asked.position, int(asked.mode), row.query).reshape(-1).view(np.uint8)
        finally:
            release = np.array([(Verb.RELEASE, 0, 0, 0)], CONTROL)
            begin_step(cache, WorkerPlan(release, ()))
            cache.end_step()

    def overflows(self, row: AuditedRow, rows: np.ndarray, mode: AuditMode = AuditMode.ROWS) -> bool:
        """Return whether the query, or attention over all of ``rows``, is not finite: ``row`` must not be judged then.

        The R-worker multiplies the values of tokens that a row must not see by the weight 0: tokens of the same span
        that come later, and tokens of the same tile that precede the row's window. If such a value is not finite, the
        row may become NaN. A row that is attended alone reads fewer of these tokens. So all tokens are attended here,
        without a window.
        """
        asked, layer, dtype = row.question, self._layout.layers[row.question.layer], self._layout.model_dtype
        if row.query is None or not _is_finite(row.query, dtype):
            return True
        if isinstance(layer, Attending):
            layer = msgspec.structs.replace(layer, window=0, chunked=False)
        last = replace(row, question=replace(asked, position=max(asked.position, asked.num_tokens - 1)))
        found = self._attend(last, layer, rows, mode)
        if asked.mode is AuditMode.ATTEND:
            return not _is_finite(found, dtype)
        partials = found.view(np.float32).reshape(-1, layer.partial_shape[-1])
        return not np.isfinite(partials[:, 1:]).all()  # column 0, the largest score, is -inf where no token is seen

    def close(self) -> None:
        """Free the caches; may be called twice."""
        for _, cache in self._caches.values():
            cache.close()
        self._caches.clear()

    def _mode_for(self, layer: Layer) -> AuditMode:
        """Return BLOCKS if a block of ``layer`` takes as many bytes as its tokens, else ROWS."""
        if not layer.is_audited:
            return AuditMode.ROWS
        token_bytes = layer.token_bytes(self._layout.kv_dtype)
        num_bytes = block_bytes(replace(self._layout, layers=(layer,)), self._block_size)
        return AuditMode.BLOCKS if num_bytes == self._block_size * token_bytes else AuditMode.ROWS

    def _cache(self, layer: Layer, num_tokens: int) -> _rworker.RWorker:
        """Return a cache for ``num_tokens`` tokens of one layer like ``layer``."""
        room, cache = self._caches.get(layer, (0, None))
        if cache is None or room < num_tokens:
            if cache:
                cache.close()
            room = 1 << max(num_tokens - 1, 1023).bit_length()
            cache = make_layer_cache(replace(self._layout, layers=(layer,)), room, 1, (), self._block_size)
            self._caches[layer] = room, cache
        return cache


def _is_finite(values: np.ndarray, dtype: str) -> bool:
    """Return whether ``values``, C-contiguous bytes or elements of ``dtype``, are all finite."""
    return bool(np.isfinite(from_wire(values.reshape(-1).view(WIRE_DTYPE[dtype]), dtype)).all())
