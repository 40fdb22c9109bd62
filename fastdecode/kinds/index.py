"""Layers of trained sparsity: an index picks the tokens that later layers see."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from msgspec.structs import force_setattr

from fastdecode.core.dtypes import is_quantized, row_bytes
from fastdecode.kinds.kind import MAX_PICK_BLOCK, HeadDim, Heads, LayerKind, Number, Shape


class Index(LayerKind, frozen=True, tag="index"):
    """A layer that picks the tokens that later layers see. It caches index keys, one head per token.

    A later layer whose ``picked_by`` names this layer attends only to the picked tokens. This layer's own o has no
    meaning. A query picks at most ``picks`` tokens: those with the largest sum over heads of relu(scale · q · k) ·
    weight. Each head's weight is a float32, sent in two more elements of q. With ``pick_block``, head i instead picks
    ``picks`` blocks of ``pick_block`` tokens for KV head i: the last ``pick_local`` blocks, and those with the largest
    q · k. If a sequence is cached in ranges, each R-worker answers with the scores of its best tokens or blocks. Before
    the next layer, the S-worker tells each R-worker how many of its own tokens or blocks are picked
    (``PoolWorker.share``).
    """

    kind = "index"
    ranks_tokens = True
    values_in_keys = True
    num_kv_heads = 1
    value_head_dim = 1
    stored_value_dim = 0

    num_heads: Heads
    key_head_dim: HeadDim
    scale: Number
    picks: Annotated[int, Meta(ge=1, le=1 << 30)]
    pick_block: Annotated[int, Meta(ge=0, le=MAX_PICK_BLOCK)] = 0
    pick_local: Annotated[int, Meta(ge=0, le=1 << 30)] = 0

    def __post_init__(self) -> None:
        force_setattr(self, "scale", float(self.scale))  # Layouts are compared as JSON text, in which 1 and 1.0 differ

    @property
    def query_dim(self) -> int:
        """Number of elements of q that the S-worker sends per token and head, with the head's weight if it has one."""
        return self.key_head_dim + (0 if self.pick_block else 2)

    @property
    def row_shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        return (self.num_heads, self.query_dim), (1, self.key_head_dim), (1, 0), (self.num_heads, 1)

    @property
    def partial_shape(self) -> Shape:
        """(Heads that pick separately, elements): each head's scores, best first; a score is the bits of a uint32."""
        return (self.num_heads if self.pick_block else 1), self.picks

    @property
    def kv_elements(self) -> int:
        return self.key_head_dim

    def multiply_adds(self) -> int:
        return self.num_heads * self.key_head_dim

    def head_bytes(self, kv_dtype: str) -> tuple[int, int]:
        """See :class:`LayerKind`. Caches of int8 and int4 keep index keys as bfloat16."""
        return row_bytes(self.key_head_dim, "bfloat16" if is_quantized(kv_dtype) else kv_dtype), 0

    @property
    def block_tokens(self) -> int:
        return self.pick_block

    def cannot_lie_in(self, block_size: int) -> str | None:
        if self.pick_block % block_size == 0:
            return None
        return (
            f"an index of this model picks the tokens that its queries see, in blocks of {self.pick_block}: "
            f"{block_size} must divide that"
        )
