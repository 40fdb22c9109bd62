"""Prompt attention on the S-worker: a chunk attends over prompt tokens whose keys the S-worker still holds.

On a CPU an R-worker's kernels compute it, over a cache in the S-worker's process. So a token gets the same bits as on
an R-worker, however its prompt is cut into chunks; torch would also be slower. On a GPU torch's attention computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from fastdecode.core.errors import interrupts_deferred
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.step import MiniBatch
from fastdecode.core.types import CONTROL, SPAN, SpanMode, StepPlan, Verb, WorkerPlan
from fastdecode.kinds.attending import Attending
from fastdecode.sworker.run.staging import PromptRows, from_numpy, to_numpy


class Sight(NamedTuple):
    """The rule that says which tokens a query sees. Without a window: the query's own token and all earlier ones.

    A ``window`` other than 0 limits them to the last ``window`` tokens, the query's own included. If ``chunked``,
    positions are instead divided into blocks of ``window`` tokens, and a query sees its own block up to its own token.
    """

    window: int = 0
    chunked: bool = False

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which queries see which keys, bool of the broadcast shape; both hold positions."""
        causal = keys <= queries
        if not self.window:
            return causal
        return causal & (keys >= (queries - queries % self.window if self.chunked else queries - self.window + 1))


def causal_mask(num_rows: int, num_keys: int, sight: Sight, device: torch.device) -> torch.Tensor:
    """Return bool [num_rows, num_keys], True if a query sees a key: causal, with the last query at the last key."""
    query_positions = torch.arange(num_keys - num_rows, num_keys, device=device)[:, None]
    return sight.sees(query_positions, torch.arange(num_keys, device=device)[None, :])


def sight_of(layer: Attending) -> Sight:
    """Return which tokens the queries of ``layer`` see."""
    return Sight(layer.window, layer.chunked)


MASK_ELEMENTS = 1 << 22
"""Most elements of a mask with ALiBi biases, which limits how many rows attend at once."""


@functools.lru_cache(maxsize=1024)
def slopes_on(layer: Attending, device: torch.device) -> torch.Tensor:
    """Return the layer's ALiBi slopes, float32 [num_heads], cached on ``device``, since a copy stalls the host."""
    return torch.tensor(layer.alibi_slopes, device=device)


def alibi_bias(num_rows: int, num_keys: int, layer: Attending, device: torch.device) -> torch.Tensor:
    """Return the ALiBi bias, float32 [num_heads, num_rows, num_keys]: slope · (key position - query position)."""
    query_positions = torch.arange(num_keys - num_rows, num_keys, device=device)[:, None]
    distances = torch.arange(num_keys, device=device)[None, :] - query_positions
    return slopes_on(layer, device)[:, None, None] * distances


@functools.lru_cache(maxsize=1024)
def sinks_on(layer: Attending, device: torch.device) -> torch.Tensor:
    """Return the layer's sinks, float32 [num_heads], cached on ``device``, since a copy stalls the host."""
    return torch.tensor(layer.sinks, device=device)


def values_of(k: torch.Tensor, v: torch.Tensor, layer: Attending) -> torch.Tensor:
    """Return the values of rows ``k`` and ``v`` [rows, num_kv_heads, …].

    Values are ``v``, or the first dims of ``k`` if the layer stores its values in its keys.
    """
    return k[..., : layer.value_head_dim] if layer.values_in_keys else v


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Attending, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return prompt attention by plain float32 operations, with all rules of a layer; tests compare other code with it.

    ``q`` [rows, num_heads, key_head_dim]; ``k`` and ``v`` [keys, num_kv_heads, …], the rows' own keys last. The result
    is [rows, num_heads, value_head_dim] in q's dtype. ``seen``: the tokens that an index picks, bool [1 or
    num_kv_heads, rows, keys].
    """
    group = layer.num_heads // layer.num_kv_heads
    keys = k.float().repeat_interleave(group, dim=1)
    values = values_of(k, v, layer).float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if layer.alibi_slopes:
        scores += alibi_bias(len(q), len(k), layer, q.device)
    scores.masked_fill_(~causal_mask(len(q), len(k), sight_of(layer), q.device), float("-inf"))
    if seen is not None:
        scores.masked_fill_(~seen.repeat_interleave(layer.num_heads // len(seen), 0), float("-inf"))
    if layer.sinks:
        sinks = sinks_on(layer, q.device)[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def rows_by_head(rows: torch.Tensor, layer: Attending) -> torch.Tensor:
    """Return ``rows`` [rows, num_heads or num_kv_heads, dim] in the form of torch's kernel, [1, num_heads, rows, dim].

    A single KV head, such as that of latents, is not copied per query head.
    """
    heads = rows.transpose(0, 1)[None]
    if heads.shape[1] == 1:
        return heads.expand(-1, layer.num_heads, -1, -1)
    return (
        heads.repeat_interleave(layer.num_heads // heads.shape[1], dim=1) if heads.shape[1] < layer.num_heads else heads
    )


def prompt_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Attending) -> torch.Tensor:
    """Attend as :func:`reference_attention` does, but by torch's fused kernel if the layer has no soft cap or sinks.

    The kernel's ``is_causal`` puts the first query at the first key, which is right only for a prompt's first chunk.
    Later chunks, windows and ALiBi get an explicit mask. Their rows are split into groups, since the kernel computes
    masked keys too.
    """
    if layer.soft_cap or layer.sinks:
        return reference_attention(q, k, v, layer)
    queries, keys, values = (rows_by_head(rows, layer) for rows in (q, k, values_of(k, v, layer)))
    if len(q) == len(k) and not layer.alibi_slopes and not (layer.window and layer.window < len(k)):
        o = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=layer.scale)
        return o[0].transpose(0, 1)
    tiles, end = [], len(k) - len(q)
    for rows in queries.split(_tile_rows(layer, len(k)), dim=2):
        end += rows.shape[2]
        mask = _mask(rows.shape[2], end, layer, q)
        tile = F.scaled_dot_product_attention(
            rows, keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=layer.scale
        )
        tiles.append(tile)
    return torch.cat(tiles, dim=2)[0].transpose(0, 1)


def _tile_rows(layer: Attending, num_keys: int) -> int:
    """Return how many rows share one mask: fewer with ALiBi, whose masks differ by head."""
    # Rows of a later chunk that attend in one call: over all earlier keys and, with a mask, over keys of the same rows
    tile_rows = 256
    return max(1, MASK_ELEMENTS // (layer.num_heads * num_keys)) if layer.alibi_slopes else tile_rows


def _mask(num_rows: int, num_keys: int, layer: Attending, q: torch.Tensor) -> torch.Tensor:
    seen = causal_mask(num_rows, num_keys, sight_of(layer), q.device)
    if not layer.alibi_slopes:
        return seen
    bias = alibi_bias(num_rows, num_keys, layer, q.device).masked_fill_(~seen, float("-inf"))
    return bias if q.device.type == "cpu" else bias.to(q.dtype)


class PromptAttention(Protocol):
    """The interface that attends prompt chunks on the S-worker, and keeps their keys and values for later chunks.

    The scheduler limits the number of kept tokens (``--prefill-scratch``).
    """

    over_latents: bool
    """True if queries of latent layers must be absorbed, wherever R-workers absorb theirs, and o is over latents."""

    def begin_step(self, mini_batches: Sequence[MiniBatch]) -> None:
        """Begin a step with these mini-batches."""

    def attend(
        self, layer: int, mini_batch: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[PromptRows]
    ) -> list[torch.Tensor]:
        """Return o of each of the chunks ``rows`` of a mini-batch, [rows, num_heads, value_head_dim].

        ``q``, ``k``, ``v``: [rows, heads, dim] of the whole mini-batch, after rotation.
        """

    def end_step(self) -> None:
        """Keep the keys and values of the step's chunks."""

    def abandon_step(self) -> None:
        """Drop the chunks of the step; no effect without an open step."""

    def forget(self, sequence_id: int) -> None:
        """Free the keys and values that are kept for sequence ``sequence_id``, if any."""

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """Ids of the sequences whose keys and values are kept."""


class PromptCache:
    """A ``PromptAttention`` by an R-worker in the S-worker's process, on the same cores."""

    over_latents = False

    def __init__(self, backend: AttentionBackend) -> None:
        """``backend``: a single R-worker, which was opened for the model's layout."""
        self._backend = backend
        self._kept: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._unwanted: list[int] = []
        self._in_step = False

    def begin_step(self, mini_batches: Sequence[MiniBatch]) -> None:
        """See ``PromptAttention.begin_step``. A step with no chunk to attend and no sequence to free is not sent.

        Kept tokens at or after a chunk's first position are dropped: the prompt has restarted, or a step failed.
        """
        spans = tuple(_spans(mini_batch) for mini_batch in mini_batches)
        if not self._unwanted and not any(map(len, spans)):
            return
        names = ("sequence_id", "context_len", "num_rows")
        ids, starts, counts = (np.concatenate([each[name] for each in spans]).tolist() for name in names)
        dropped = {each: start for each, start in zip(ids, starts, strict=True) if self._kept.get(each, 0) > start}
        controls = [(int(Verb.RELEASE), each, 0, 0) for each in self._unwanted]
        controls += [(int(Verb.TRUNCATE), each, 0, start) for each, start in dropped.items()]
        with interrupts_deferred():
            self._backend.begin_step(StepPlan((WorkerPlan(np.array(controls, CONTROL), spans),)))
            self._in_step = True
            self._unwanted.clear()
            self._kept |= dropped
        self._ends = {each: start + count for each, start, count in zip(ids, starts, counts, strict=True)}

    def attend(
        self, layer: int, mini_batch: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[PromptRows]
    ) -> list[torch.Tensor]:
        if not rows:
            return []
        self._backend.submit(mini_batch, layer, *(to_numpy(_taken(each, rows)) for each in (q, k, v)))
        o = from_numpy(self._backend.collect(mini_batch), q.dtype)
        return list(o.split([_length(each) for each in rows]))

    def end_step(self) -> None:
        if self._in_step:
            with interrupts_deferred():
                self._in_step = False
                self._backend.end_step()
                self._kept |= self._ends

    def abandon_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self._backend.abandon_step()

    def forget(self, sequence_id: int) -> None:
        """See ``PromptAttention.forget``. The next step frees the sequence's blocks."""
        if sequence_id in self._kept:
            del self._kept[sequence_id]
            self._unwanted.append(sequence_id)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        return tuple(self._kept)


def _spans(mini_batch: MiniBatch) -> np.ndarray:
    """Return the chunks that attend on the S-worker as SPAN records for ``PromptCache``'s own R-worker."""
    chunks = mini_batch.chunks[~mini_batch.chunks["attends"]]
    spans = np.full(len(chunks), SpanMode.ATTEND, SPAN)
    for name in ("sequence_id", "context_len", "num_rows"):
        spans[name] = chunks[name]
    return spans


def _taken(tensor: torch.Tensor, rows: Sequence[PromptRows]) -> torch.Tensor:
    return tensor[rows[0].rows] if len(rows) == 1 else torch.cat([tensor[each.rows] for each in rows])


def _length(rows: PromptRows) -> int:
    return rows.rows.stop - rows.rows.start
