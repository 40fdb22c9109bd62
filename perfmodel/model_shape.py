"""The shape of a transformer for plans: the bytes per token in caches and on links, and of states."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.kinds import Dense, Latent
from fastdecode.kinds.layout import KVLayout
from fastdecode.perfmodel.model_sizes import ModelSizes
from fastdecode.perfmodel.state_shape import StateShape


@dataclass(frozen=True)
class ModelShape(ModelSizes):
    """A model as R-workers, links and S-workers see it. Its fields are those of :class:`ModelSizes`."""

    def with_kv_heads(self, num_kv_heads: int) -> ModelShape:
        """Return a copy of this model with ``num_kv_heads`` KV heads."""
        return replace(self, num_kv_heads=num_kv_heads)

    def with_state_dtype(self, dtype: str) -> ModelShape:
        """Return this model with states in ``dtype``, a key of ``ITEM_BYTES``."""
        return replace(self, state=replace(self.state, item_bytes=ITEM_BYTES[dtype])) if self.state else self

    def keeping_states(self, at_s_worker: bool) -> ModelShape:
        """Return this model with its states on the S-worker, or on R-workers; unchanged without states."""
        return replace(self, state=replace(self.state, at_s_worker=at_s_worker)) if self.state else self

    @property
    def sent_states(self) -> StateShape | None:
        """Recurrent layers whose rows are sent to R-workers; None if there are none."""
        return None if self.own_states else self.state

    @property
    def own_states(self) -> StateShape | None:
        """Recurrent layers whose states the S-worker keeps; None if there are none."""
        return self.state if self.state and self.state.at_s_worker else None

    @property
    def sent_share(self) -> float:
        """Fraction of the layers whose rows are sent to R-workers and back."""
        return 1.0 - (self.own_states.num_layers if self.own_states else 0) / self.num_layers

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of one sequence's states over all layers. A step reads and writes all of them."""
        return self.state.bytes_per_sequence if self.state else 0

    @property
    def group(self) -> int:
        """The number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_layout(self) -> Dense | Latent:
        """The cache layout of one attending layer on an R-worker."""
        if self.latent:
            return self.latent.layer_layout(self.num_heads)
        return Dense(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5)

    def kv_layout(self, kv_dtype: str) -> KVLayout:
        """Return the cache layout of all attending layers on R-workers, stored as ``kv_dtype``."""
        return KVLayout((self.layer_layout,) * self.attention_layers, self.dtype, kv_dtype)

    def some_layers(self, number: int) -> KVLayout:
        """Return the cache layout of ``number`` attending layers, stored in the model's dtype."""
        return KVLayout((self.layer_layout,) * number, self.dtype, self.dtype)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes that one token takes in the KV cache over all layers, with the keys of an index."""
        return self.kv_layout(kv_dtype).kv_bytes_per_token + self._index_bytes

    def absorbing(self, at_r_workers: bool) -> ModelShape:
        """Return this model with K and V of its latents multiplied on R-workers, or on the S-worker.

        Other models stay as they are.
        """
        return replace(self, latent=replace(self.latent, at_r_workers=at_r_workers)) if self.latent else self

    def read_share(self, kv_dtype: str, row_share: float) -> float:
        """Return the fraction of the cache's bytes that a step reads if the mean layer reads ``row_share`` of its rows.

        An index scans all of its keys.
        """
        rows = self.kv_layout(kv_dtype).kv_bytes_per_token
        return (row_share * rows + self._index_bytes) / (rows + self._index_bytes)

    @property
    def attending_row_bytes(self) -> int:
        """Bytes of q, k, v and o of one row and layer on the link: (2·N + 2·K)·H elements (FastDecode, section 3).

        This is the mean over layers, with the queries and key of an index, and what recurrent layers send and receive.
        """
        layer = self.layer_layout
        queries = self.attention_layers * layer.num_heads * (layer.query_dim + layer.output_dim)
        if self.index:
            queries += self.index.num_layers * self.index.num_heads * self.index.head_dim
        state = self.sent_states
        outputs = state.num_layers * state.output_bytes(self.item_bytes) if state else 0
        return (queries * self.item_bytes + outputs) // self.num_layers + self.appending_row_bytes

    @property
    def appending_row_bytes(self) -> int:
        """Bytes that an R-worker stores per row and layer: those of k and v, or of a recurrent layer's row."""
        rows = self.attention_layers * self.layer_layout.kv_elements * self.item_bytes + self._index_bytes
        if self.sent_states:
            rows += self.sent_states.num_layers * self.sent_states.row_bytes(self.item_bytes)
        return rows // self.num_layers

    @property
    def _index_bytes(self) -> int:
        return self.index.kv_bytes_per_token(self.dtype) if self.index else 0
