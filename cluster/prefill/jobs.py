"""A prefill worker's job: computes one part of a prompt, and exchanges keys and values with other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fastdecode.cluster.prefill.messages import Prompt
from fastdecode.cluster.prefill.rows import Arrays, LayerRows
from fastdecode.cluster.prefill.stores import Send, Stores, StoreWay
from fastdecode.core.errors import FastDecodeError, FrameError
from fastdecode.core.remote_prefill import PromptKV
from fastdecode.kinds.layout import KVLayout

TICK_SECONDS = 0.2
"""Seconds to wait for other workers' keys and values before the S-worker's connection is checked again."""

LAYERS_AHEAD = 2
"""Layers by which requests for a prefix precede the computed layer, so that transfers overlap with computing."""

Read = Callable[[int, np.ndarray, Callable[[], None]], None]
"""A function that queues the reading of some tokens of a prefix in one layer from their R-worker.

Its arguments: layer, the array to fill with the cache's bytes, and a function to call when the array is filled.
"""


@dataclass(frozen=True)
class ReadWay:
    """An R-worker from which tokens ``start`` to ``end`` of a prompt's prefix are read. ``read`` requests them."""

    start: int
    end: int
    read: Read


class JobCancelledError(FastDecodeError):
    """The S-worker has cancelled this prompt, or is gone."""


class PromptJob:
    """One part (consecutive tokens) of a prompt, which this worker computes. Other workers compute the other parts.

    The port's thread writes the keys and values that other workers send into this object's arrays.

    With KV-Runahead, a worker gets all earlier parts from the previous worker, and sends them and its own part to the
    next worker. A prefix is a part before the first; the first worker reads it from the R-worker. With tensor/sequence
    parallelism, every worker needs all parts. Each part passes from worker to worker in a ring, until all have it.
    """

    def __init__(
        self,
        prompt: Prompt,
        token_ids: np.ndarray,
        layout: KVLayout,
        send_on: Send | None,
        stores: Sequence[StoreWay],
        prefix: Sequence[ReadWay] = (),
    ) -> None:
        """``layout``: the model's layout, with the R-workers' KV dtype and arithmetic.

        ``send_on``: sends rows to the next prefill worker; None if there is none. ``stores``: the R-workers that store
        tokens of the prompt. ``prefix``: the R-workers that hold the prefix; only the first worker needs them.
        """
        self.prompt, self.token_ids, self.layout = prompt, token_ids, layout
        self._bounds = (0, *prompt.bounds) if prompt.context_len else prompt.bounds
        self._own = prompt.part + len(self._bounds) - len(prompt.bounds)
        self._prefix = tuple(prefix) if prompt.part == 0 else ()
        self.is_cancelled = False
        self._send_on = send_on
        self.stores = Stores(prompt, stores)
        self._changed = threading.Condition()
        self._layers: dict[int, LayerRows] = {}
        self._states: dict[int, np.ndarray] = {}
        self._has_state: set[int] = set()
        self._num_done = 0
        self.sent_bytes = self.read_bytes = 0

    def begin(self) -> None:
        """Request the prefix of the first LAYERS_AHEAD layers, if this worker reads the prefix.

        Raise ConnectionError if the R-worker is gone.
        """
        for layer in range(LAYERS_AHEAD):
            self._read_prefix(layer)

    def cancel(self) -> None:
        """End the job's computation at its next layer, or at once if it waits for other workers."""
        with self._changed:
            self.is_cancelled = True
            self._changed.notify_all()

    def place_for(self, layer: int, start: int, num_rows: int) -> Arrays:
        """Return arrays to fill with ``num_rows`` rows from position ``start``. Raise FrameError if not expected."""
        if 0 <= layer < len(self.layout.layers) and not self.layout.layers[layer].caches_rows:
            return self._place_for_state(layer, start, num_rows)
        if self._prefix and start < self.prompt.start:
            raise FrameError(f"KV of job {self.prompt.job_id}: rows of its prefix; its prefix comes from R-workers")
        part = self._part_of(start)
        with self._changed:
            rows = self._rows(layer) if self._num_done <= layer < len(self.layout.layers) else None
            expected = -1 if rows is None else self._bounds[part] + rows.filled[part]
            end = self._bounds[part + 1]
        if rows is None or part == self._own or start != expected or not 0 < num_rows <= end - start:
            raise FrameError(
                f"KV of job {self.prompt.job_id}, layer {layer}: this worker expects no {num_rows} rows from "
                f"position {start}"
            )
        if end > rows.end:
            raise FrameError(f"KV of job {self.prompt.job_id}: position {start} is after this worker's part")
        return rows.of(start, start + num_rows)

    def take_in(self, layer: int, start: int, arrays: Arrays) -> None:
        """Copy in rows that another worker sent before this job began. Raise FrameError for unexpected rows."""
        found = self.place_for(layer, start, len(arrays[0]))
        places, rows = ([each for each in some if each.nbytes] for some in (found, arrays))
        if [each.nbytes for each in places] != [each.nbytes for each in rows]:
            raise FrameError(f"KV of job {self.prompt.job_id}: rows from {start} on have another form than k and v")
        for place, each in zip(places, rows, strict=True):  # a prefix's rows came as bytes, so dtypes differ
            place[...] = each.view(place.dtype).reshape(place.shape)
        self.filled(layer, start, len(arrays[0]))

    def filled(self, layer: int, start: int, num_rows: int) -> None:
        """Note that the arrays from ``place_for`` with the same arguments are filled."""
        with self._changed:
            if not self.layout.layers[layer].caches_rows:
                self._has_state.add(layer)
                self._changed.notify_all()
                return
            self._rows(layer).filled[self._part_of(start)] += num_rows
            self._changed.notify_all()

    def exchange(self, layer: int, k: np.ndarray, v: np.ndarray) -> PromptKV:
        """Send this part's ``k`` and ``v`` of ``layer`` to others; return all rows that the part attends to.

        Waits for rows from other workers; see ``Exchange``. Raise JobCancelledError if the job was cancelled.
        """
        self._check_wanted()
        prompt = self.prompt
        with self._changed:
            rows = self._rows(layer)
        for place, own in zip(rows.of(prompt.start, prompt.end), (k, v), strict=True):
            place[...] = own
        self._read_prefix(layer + LAYERS_AHEAD)
        self.stores.send(partial(self._send, layer=layer, rows=rows))
        if prompt.method == "tsp":
            self._go_round(layer, rows)
        else:
            self._hand_on(layer, rows)
        with self._changed:
            del self._layers[layer]
            self._num_done = layer + 1
        return rows.kv

    def advance(self, layer: int, by_own_rows: Callable[[np.ndarray | None], tuple[Any, np.ndarray]]) -> Any:
        """Advance the state of recurrent layer ``layer`` by this part's rows, and send the new state on.

        Wait first for the state after the earlier parts. After the last part, the state goes to the R-workers that
        store the prompt. Raise JobCancelledError if the job was cancelled.
        """
        self._check_wanted()
        output, state = by_own_rows(self._await_state(layer) if self.prompt.part else None)
        arrays = (state[None],)
        if self._send_on is not None:
            self.sent_bytes += self._send_on(layer, self.prompt.start, arrays)
        if self.prompt.is_last:
            self.stores.send(lambda send, first, end: send(layer, self.prompt.start, arrays))
        with self._changed:
            self._states.pop(layer, None)
            self._num_done = layer + 1
        return output

    def _check_wanted(self) -> None:
        if self.is_cancelled:
            raise JobCancelledError(f"job {self.prompt.job_id} was cancelled")

    def _place_for_state(self, layer: int, start: int, num_rows: int) -> Arrays:
        """Return the array for the state of ``layer`` after the previous part, which another worker sends."""
        with self._changed:
            wanted = self._num_done <= layer and layer not in self._states and self.prompt.part > 0
            if not wanted or num_rows != 1 or start != self.prompt.bounds[self.prompt.part - 1]:
                raise FrameError(
                    f"KV of job {self.prompt.job_id}, layer {layer}: this worker expects no state at position {start}"
                )
            self._states[layer] = np.empty(self.layout.sequence_bytes(layer), np.uint8)
            return (self._states[layer][None],)

    def _await_state(self, layer: int) -> np.ndarray:
        with self._changed:
            while layer not in self._has_state:
                self._check_wanted()
                self._changed.wait(TICK_SECONDS)
            return self._states[layer]

    def _hand_on(self, layer: int, rows: LayerRows) -> None:
        """Send rows to the next worker of the chain: this part's rows at once, then earlier parts' as they arrive."""
        self._pass(layer, rows, self._own)
        for part in range(self._own):
            self._await(rows, part)
            self._pass(layer, rows, part)

    def _go_round(self, layer: int, rows: LayerRows) -> None:
        """Send rows to the ring's next worker: this part's, then each arriving part except the next worker's own."""
        count, own = self.prompt.num_parts, self.prompt.part
        self._pass(layer, rows, own)
        for step in range(1, count):
            part = (own - step) % count
            self._await(rows, part)
            if step < count - 1:
                self._pass(layer, rows, part)

    def _read_prefix(self, layer: int) -> None:
        if not self._prefix or layer >= len(self.layout.layers):
            return
        with self._changed:
            rows = self._rows(layer)
        for each in self._prefix:
            (stored,) = rows.of(each.start, each.end)
            each.read(layer, stored, partial(self.filled, layer, each.start, len(stored)))
            self.read_bytes += stored.nbytes

    def _pass(self, layer: int, rows: LayerRows, part: int) -> None:
        if self._send_on is not None:
            first, end = self._bounds[part : part + 2]
            self.sent_bytes += self._send(self._send_on, first, end, layer, rows)

    def _send(self, send: Send, first: int, end: int, layer: int, rows: LayerRows) -> int:
        """Send the rows of positions ``first`` to ``end`` by ``send``, in pieces; return the number of bytes."""
        if first >= end:
            return 0
        arrays = rows.of(first, end)
        # Most bytes of keys in one KV frame. A decode step on the R-worker waits for one frame at most, so it is small.
        kv_bytes = 1 << 22
        step = max(1, kv_bytes // max(1, arrays[0][:1].nbytes))
        return sum(
            send(layer, first + start, tuple(each[start : start + step] for each in arrays))
            for start in range(0, end - first, step)
        )

    def _await(self, rows: LayerRows, part: int) -> None:
        wanted = self._bounds[part + 1] - self._bounds[part]
        with self._changed:
            while rows.filled[part] < wanted:
                self._check_wanted()
                self._changed.wait(TICK_SECONDS)

    def _rows(self, layer: int) -> LayerRows:
        if layer not in self._layers:
            end = self._bounds[-1] if self.prompt.method == "tsp" else self.prompt.end
            shape, count = self.layout.layers[layer], len(self._bounds) - 1
            self._layers[layer] = LayerRows(self.layout, shape, self.prompt.context_len, end, count)
        return self._layers[layer]

    def _part_of(self, start: int) -> int:
        """Return the number of the part with position ``start``. Raise FrameError for a position after the prompt."""
        if not 0 <= start < self._bounds[-1]:
            raise FrameError(f"KV of job {self.prompt.job_id}: position {start} is beyond its prompt")
        return int(np.searchsorted(self._bounds, start, side="right")) - 1
