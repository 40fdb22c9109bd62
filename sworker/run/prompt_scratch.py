"""Attention of prompt chunks by torch on the model's device, over keys, values and picked tokens that it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastdecode.core.step import MiniBatch
from fastdecode.kinds import Index
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.adapters.index import picked
from fastdecode.sworker.run.prompts import prompt_attention, reference_attention
from fastdecode.sworker.run.staging import PromptRows
from fastdecode.sworker.run.stored_rows import as_stored


class PromptScratch:
    """A ``PromptAttention`` by torch on the model's device.

    It keeps keys and values of prompts in progress as tensors, as R-workers' caches store them.
    """

    over_latents = True

    def __init__(self, layout: KVLayout) -> None:
        self._layers, self._kv_dtype = layout.layers, layout.kv_dtype
        self._rounds = layout.kv_dtype != layout.model_dtype
        self._kept: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._picked: dict[int, torch.Tensor] = {}

    def begin_step(self, mini_batches: Sequence[MiniBatch]) -> None:
        self._picked.clear()

    def attend(
        self, layer: int, mini_batch: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[PromptRows]
    ) -> list[torch.Tensor]:
        return [self._attend(layer, q[each.rows], k[each.rows], v[each.rows], each) for each in rows]

    def end_step(self) -> None:
        """Do nothing."""

    def abandon_step(self) -> None:
        """Do nothing: rows that are computed again overwrite those of the abandoned step."""

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PromptRows) -> torch.Tensor:
        if self._rounds:
            k, v = as_stored(k, v, self._layers[layer], self._kv_dtype)
        if rows.context_len or not rows.last_of_prompt:
            k, v = self.extend(rows.sequence_id, layer, rows.context_len, k, v)
        spec, sequence_id = self._layers[layer], rows.sequence_id
        if isinstance(spec, Index):  # an index layer: the next layers attend only to the tokens that it picks
            self._picked[sequence_id] = picked(q, k, spec)
            return q.new_zeros((len(q), *spec.row_shapes[3]))
        if not isinstance(spec, Attending):
            raise TypeError(f"layer {layer} is {spec.kind}, which prompt attention does not compute")
        if spec.reads >= 0:
            return reference_attention(q, k, v, spec, self._picked[sequence_id])
        return prompt_attention(q, k, v, spec)

    def extend(
        self, sequence_id: int, layer: int, start: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store rows from position ``start`` on; return all keys and values of the sequence that are kept now."""
        layers, end = self._kept.setdefault(sequence_id, {}), start + len(k)
        keys, values = layers.get(layer, (k[:0], v[:0]))
        if len(keys) < end:
            keys, values = _grown(keys, end), _grown(values, end)
            layers[layer] = (keys, values)
        keys[start:end], values[start:end] = k, v
        return keys[:end], values[:end]

    def forget(self, sequence_id: int) -> None:
        self._kept.pop(sequence_id, None)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        return tuple(self._kept)


def _grown(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a copy of ``rows`` with space for ``num_rows``. Space at least doubles, so few chunks cause a copy."""
    grown = rows.new_empty((max(num_rows, 2 * len(rows)), *rows.shape[1:]))
    grown[: len(rows)] = rows
    return grown
