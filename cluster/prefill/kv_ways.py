"""Sends a prompt's keys and values to the KV ports of R-workers that store them, and reads a prefix from KV ports.

If ranks share the model, a logical R-worker is one process per rank, each with the rank's KV heads and its own port.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fastdecode.cluster.prefill.jobs import Read
from fastdecode.cluster.prefill.messages import PlacedRows
from fastdecode.cluster.prefill.rows import Arrays
from fastdecode.cluster.prefill.senders import PrefixReader, StoreSender
from fastdecode.cluster.prefill.stores import Send
from fastdecode.core.errors import FrameError
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout


class PortHeads:
    """Tells which of a model's KV heads each KV port of a logical R-worker takes."""

    def __init__(self, layout: KVLayout, kv_heads: Sequence[int]) -> None:
        """``layout``: the whole model's. ``kv_heads``: see ``PrefillHello``. Raise FrameError for wrong head counts."""
        if len(kv_heads) != len(layout.layers):
            raise FrameError(f"HELLO: KV heads of {len(kv_heads)} layers, and the model has {len(layout.layers)}")
        for layer, count in zip(layout.layers, kv_heads, strict=True):
            if layer.num_kv_heads % count:
                raise FrameError(f"HELLO: {count} KV heads at a port, and the model has {layer.num_kv_heads}")
        self._layout, self._kv_heads = layout, tuple(kv_heads)

    def check(self, num_ports: int) -> None:
        """Raise FrameError unless ``num_ports`` ports together take all KV heads, each head equally often."""
        for layer, count in zip(self._layout.layers, self._kv_heads, strict=True):
            if num_ports % (layer.num_kv_heads // count):
                each = f"{num_ports} ports of {count} KV heads each"
                raise FrameError(f"PROMPT: {each} do not take each of the model's {layer.num_kv_heads} equally often")

    def of(self, layer: int, port: int, num_ports: int) -> slice:
        """Return the range of KV heads of ``layer`` that port ``port`` of ``num_ports`` takes."""
        count = self._kv_heads[layer]
        first = port * (self._layout.layers[layer].num_kv_heads // count) // num_ports * count
        return slice(first, first + count)

    def part(self, layer: int, port: int, num_ports: int, arrays: Arrays) -> Arrays:
        """Return ``arrays`` of a layer, cut to the KV heads of port ``port``; a recurrent state is returned whole."""
        if not self._layout.layers[layer].caches_rows:
            return arrays
        own = self.of(layer, port, num_ports)
        return tuple(np.ascontiguousarray(each[:, own]) for each in arrays)

    def take(self, layer: int, heads: slice, rows: np.ndarray, stored: np.ndarray) -> None:
        """Copy ``rows``, cached bytes of the KV heads ``heads``, to those heads of ``stored``; both uint8 [rows, …]."""
        shape, kv_dtype = self._layout.layers[layer], self._layout.kv_dtype
        for whole, part in zip(
            _by_head(shape, kv_dtype, stored, shape.num_kv_heads),
            _by_head(shape, kv_dtype, rows, heads.stop - heads.start),
            strict=True,
        ):
            whole[:, heads] = part

    def empty_rows(self, layer: int, num_rows: int) -> np.ndarray:
        """Return memory for ``num_rows`` tokens in the form of the cache behind one port: uint8 [num_rows, bytes]."""
        head_bytes = sum(self._layout.layers[layer].head_bytes(self._layout.kv_dtype))
        return np.empty((num_rows, self._kv_heads[layer] * head_bytes), np.uint8)


def store_way(placed: PlacedRows, heads: PortHeads, senders: Sequence[StoreSender]) -> Send:
    """Return a function that sends rows to all KV ports of the R-worker in ``placed``.

    The function takes positions in the prompt; the R-worker counts positions from the first token that it stores.
    """

    def send(layer: int, start: int, arrays: Arrays) -> int:
        num_bytes = 0
        for port, sender in enumerate(senders):
            parts = heads.part(layer, port, len(senders), arrays)
            num_bytes += sender.send(placed.ticket, layer, start - placed.start, parts)
        return num_bytes

    return send


def read_way(placed: PlacedRows, heads: PortHeads, readers: Sequence[PrefixReader]) -> Read:
    """Return a function that reads the tokens of ``placed``; it reads each KV head at the first port that has it."""

    def read(layer: int, stored: np.ndarray, when_read: Callable[[], None]) -> None:
        parts = {heads.of(layer, port, len(readers)).start: port for port in reversed(range(len(readers)))}
        if len(parts) == 1:
            readers[0].read(placed.ticket, layer, stored, when_read)
            return
        once = after(len(parts), when_read)
        for port in parts.values():
            own, rows = heads.of(layer, port, len(readers)), heads.empty_rows(layer, len(stored))
            readers[port].read(placed.ticket, layer, rows, partial(_taken, heads, layer, own, rows, stored, once))

    return read


def after(count: int, tell: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``tell`` at its ``count``-th call; any thread may call it."""
    left, lock = [count], threading.Lock()

    def once() -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            tell()

    return once


def _taken(
    heads: PortHeads, layer: int, own: slice, rows: np.ndarray, stored: np.ndarray, once: Callable[[], None]
) -> None:
    heads.take(layer, own, rows, stored)
    once()


def _by_head(layer: Layer, kv_dtype: str, stored: np.ndarray, num_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return views of ``stored``, uint8 [rows, bytes]: keys and values [rows, num_heads, bytes of a head]."""
    key_bytes, value_bytes = layer.head_bytes(kv_dtype)
    keys, values = stored[:, : num_heads * key_bytes], stored[:, num_heads * key_bytes :]
    return keys.reshape(len(stored), num_heads, key_bytes), values.reshape(len(stored), num_heads, value_bytes)
