"""Keys and values of prompts on a prefill worker: one layer's rows, and rows that arrive before their prompt."""

from __future__ import annotations

import threading

import numpy as np

from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import FrameError
from fastdecode.core.remote_prefill import PromptKV
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout

MOST_EARLY_BYTES = 1 << 28
"""Most bytes of keys and values kept for prompts that the S-worker has not sent yet; other workers may be ahead."""

Arrays = tuple[np.ndarray, ...]
"""Rows of one layer.

(k, v), [rows, num_kv_heads, …] in the model's dtype; for a prefix (stored,), the cache's bytes, uint8 [rows, bytes].
"""


class LayerRows:
    """Keys and values of one layer, from position 0 to ``end``. ``filled``: number of arrived rows of each part."""

    def __init__(self, layout: KVLayout, layer: Layer, context_len: int, end: int, num_parts: int) -> None:
        dtype, num_rows = WIRE_DTYPE[layout.model_dtype], end - context_len
        self.end = end
        self.kv = PromptKV(
            np.empty((context_len, layer.token_bytes(layout.kv_dtype)), np.uint8),
            *(np.empty((num_rows, *shape), dtype) for shape in layer.row_shapes[1:3]),
        )
        self.filled = [0] * num_parts

    def of(self, start: int, end: int) -> Arrays:
        """Return the rows of positions ``start`` to ``end``, which are all in the prefix or all after it."""
        context_len = len(self.kv.prefix)
        if start < context_len:
            return (self.kv.prefix[start:end],)
        return self.kv.k[start - context_len : end - context_len], self.kv.v[start - context_len : end - context_len]


class EarlyRows:
    """Keeps keys and values that arrive before their prompt. Any thread may use this object."""

    def __init__(self, most_bytes: int = MOST_EARLY_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._rows: dict[int, list[tuple[int, int, Arrays]]] = {}
        self.num_bytes = 0

    def keep(self, job_id: int, layer: int, start: int, arrays: Arrays) -> None:
        """Keep rows for a prompt that has not arrived. Raise FrameError beyond MOST_EARLY_BYTES."""
        num_bytes = sum(each.nbytes for each in arrays)
        with self._lock:
            if self.num_bytes + num_bytes > self._most_bytes:
                raise FrameError(f"KV of unannounced job {job_id}: such rows may take {self._most_bytes:,} bytes")
            self._rows.setdefault(job_id, []).append((layer, start, arrays))
            self.num_bytes += num_bytes

    def take(self, job_id: int) -> list[tuple[int, int, Arrays]]:
        """Remove all rows of job ``job_id``; return (layer, first position, rows) for each arrival, in order."""
        with self._lock:
            rows = self._rows.pop(job_id, [])
            self.num_bytes -= sum(each.nbytes for _, _, arrays in rows for each in arrays)
        return rows

    def clear(self) -> None:
        """Drop the rows of all prompts."""
        with self._lock:
            self._rows.clear()
            self.num_bytes = 0


def early_place(layout: KVLayout, number: int, num_rows: int, num_bytes: tuple[int, ...]) -> Arrays:
    """Return arrays for rows of layer ``number``, before their job is known: prefix rows, prompt rows, or a state.

    ``num_bytes``: lengths of the KV frame's two parts; they tell prefix rows from prompt rows.
    """
    layer = layout.layers[number]
    if not layer.caches_rows:
        return (np.empty((1, layout.sequence_bytes(number)), np.uint8),)
    forms = [LayerRows(layout, layer, length, num_rows, 0).of(0, num_rows) for length in (num_rows, 0)]
    return forms[0] if part_bytes(forms[0]) == num_bytes else forms[1]


def part_bytes(arrays: Arrays) -> tuple[int, ...]:
    """Return the lengths in bytes of the two parts of a KV frame that carries ``arrays``."""
    return (*(each.nbytes for each in arrays), 0)[:2]
