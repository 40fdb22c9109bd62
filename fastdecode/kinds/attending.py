"""Fields shared by all layers that attend to cached keys."""

from __future__ import annotations

from typing import Annotated, Self

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from fastdecode.core.dtypes import key_bytes, row_bytes
from fastdecode.kinds.kind import MAX_LAYERS, HeadDim, Heads, LayerKind, Number, Numbers, Shape


class Attending(LayerKind, frozen=True):
    """Shape and scoring rule of a layer that attends.

    ``window``: how many tokens a query sees, its own included; 0 means all. With ``chunked``, positions are divided
    into chunks of ``window`` tokens; a query sees its chunk's tokens up to its own. ``soft_cap``: 0 for none.
    ``sinks``: an extra logit per query head, or empty. ``alibi_slopes``: one slope per query head, or empty; a scaled
    and capped score gains slope · (key position - query position). ``picked_by``: number of the index layer that picks
    the tokens that queries see; -1 if they see all.
    """

    num_heads: Heads
    num_kv_heads: Heads
    key_head_dim: HeadDim
    value_head_dim: HeadDim
    scale: Number
    window: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    soft_cap: Number = 0.0
    sinks: Numbers = ()
    alibi_slopes: Numbers = ()
    chunked: bool = False
    picked_by: Annotated[int, Meta(ge=-1, lt=MAX_LAYERS)] = -1

    def __post_init__(self) -> None:
        # The layout's fingerprint hashes its JSON text, where 1 and 1.0 differ: store floats only
        for name in ("scale", "soft_cap"):
            force_setattr(self, name, float(getattr(self, name)))
        for name in ("sinks", "alibi_slopes"):
            force_setattr(self, name, tuple(map(float, getattr(self, name))))

    @property
    def is_audited(self) -> bool:
        return self.picked_by < 0 and self.weight_rows is None

    @property
    def query_dim(self) -> int:
        """Number of elements of q that the S-worker sends per token and query head."""
        return self.key_head_dim

    @property
    def output_dim(self) -> int:
        """Number of elements of o that an R-worker returns per token and query head."""
        return self.value_head_dim

    @property
    def stored_value_dim(self) -> int:
        """Number of elements of V that are sent and cached per token and KV head."""
        return 0 if self.values_in_keys else self.value_head_dim

    @property
    def row_shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        key, value = (self.num_kv_heads, self.key_head_dim), (self.num_kv_heads, self.stored_value_dim)
        return (self.num_heads, self.query_dim), key, value, (self.num_heads, self.output_dim)

    @property
    def partial_shape(self) -> Shape:
        """(Query heads, 2 + output_dim): each head's largest score, sum of softmax weights, and o, in float32."""
        return self.num_heads, 2 + self.output_dim

    @property
    def reads(self) -> int:
        return self.picked_by

    def reading(self, index: int) -> Self:
        return replace(self, picked_by=index)

    @property
    def chunk_tokens(self) -> int:
        return self.window if self.chunked else 1

    @property
    def kv_elements(self) -> int:
        return self.num_kv_heads * (self.key_head_dim + self.stored_value_dim)

    def multiply_adds(self) -> int:
        return self.num_heads * (self.key_head_dim + self.value_head_dim)

    def token_bytes(self, kv_dtype: str) -> int:
        return self.num_kv_heads * sum(self.head_bytes(kv_dtype))

    def head_bytes(self, kv_dtype: str) -> tuple[int, int]:
        return key_bytes(self.key_head_dim, kv_dtype), row_bytes(self.stored_value_dim, kv_dtype)


class Dense(Attending, frozen=True, tag="dense"):
    """A layer whose cache holds keys and values of each token and KV head."""

    kind = "dense"
