"""The base of all kinds of layers: what the other packages ask of a layer, whatever its kind.

A kind is one frozen msgspec struct. Encoded, it is the message that describes the layer to R-workers. The C++
R-worker reads its fields by name (rworker_cpp/include/rworker/kinds).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta

MAX_HEAD_DIM = 1088
"""Largest number of elements that one head's key or value may have."""

MAX_LAYERS = 4096
MAX_HEADS = 1 << 12
MAX_NUMBER = float(np.finfo(np.float32).max)
"""Largest number that R-workers can represent, since they compute in float32."""

MAX_PICK_BLOCK = 512
"""Largest ``pick_block`` of an index layer, in tokens: one split of the R-worker's attention (``SPLIT_TOKENS``)."""

Heads = Annotated[int, Meta(ge=1, le=MAX_HEADS)]
HeadDim = Annotated[int, Meta(ge=1, le=MAX_HEAD_DIM)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MAX_HEADS)]

Shape = tuple[int, int]
"""The shape of one token's row: (number of heads, elements per head)."""

Way = Literal[
    "ranges", "ranks", "prefill workers", "tsp", "gpu", "scratch", "early-exit drafts", "sessions", "copies",
    "moves", "states", "states here", "states here, sessions", "states here, parking", "states here, prefill workers",
    "states here, ranks", "states there, memory here", "audits", "states in ranges, ranks",
    "states in ranges, sessions", "states in ranges, parking", "states in ranges, prefill workers",
]  # fmt: skip
"""A feature of the engine that some kinds of layers do not support.

ranges: a sequence is cached on several R-workers. ranks: several S-workers share each layer. tsp: every prefill worker
computes with all keys of a prompt. scratch: prompts attend on the S-worker. early-exit drafts: the first layers draft.
sessions: R-workers keep sequences for the next engine. parking: prefixes are kept on disks. copies: a second R-worker
holds a sequence too. moves: sequences move between R-workers. states: settings say how states are kept. states here:
the S-worker keeps them. states there, memory here: the S-worker sets memory aside for states that R-workers keep.
audits: some rows are computed again elsewhere, and compared.
"""


class LayerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", cache_hash=True):
    """A layer as described to R-workers. The defaults are those of a layer that caches rows and attends to them."""

    kind: ClassVar[str]
    """The kind's name, on the wire and in C++."""

    caches_rows: ClassVar[bool] = True
    """True if a cached token leaves a row of its own; False if a sequence leaves one state."""

    ranks_tokens: ClassVar[bool] = False
    """True if a layer answers which tokens later layers see, and attends to nothing."""

    values_in_keys: ClassVar[bool] = False
    """True if values are the first elements of the keys, and are neither sent nor stored."""

    @property
    def is_audited(self) -> bool:
        """True if R-workers can compute one row of this layer again, for an audit."""
        return False

    @property
    def row_shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        """The shapes (heads, elements per head) of one token's row of q, k, v and o, in this order."""
        raise NotImplementedError

    @property
    def partial_shape(self) -> Shape:
        """The shape of a row of partial results, 4 bytes an element, for sequences cached on several R-workers."""
        raise NotImplementedError

    @property
    def reads(self) -> int:
        """Number of the earlier ``Index`` layer that picks the tokens this layer's queries see; -1 if they see all."""
        return -1

    def reading(self, index: int) -> Self:
        """Return a copy whose queries see only tokens that layer ``index`` picks; by default, this layer itself."""
        return self

    @property
    def block_tokens(self) -> int:
        """A number of tokens that the cache's block size must divide; 0 allows any block size."""
        return 0

    @property
    def chunk_tokens(self) -> int:
        """A sequence split among R-workers is cut at multiples of this many tokens."""
        return 1

    @property
    def kv_elements(self) -> int:
        """Number of elements of K and V together that the cache holds per token in this layer."""
        return 0

    def multiply_adds(self) -> int:
        """Return the multiply-adds of one query row for each cached token that it reads."""
        return 0

    def head_bytes(self, kv_dtype: str) -> tuple[int, int]:
        """Return (bytes of K, bytes of V) of one cached token in one KV head, including quantization scales."""
        return 0, 0

    def token_bytes(self, kv_dtype: str) -> int:
        """Return the bytes of one cached token's K and V in all KV heads of this layer, with quantization scales."""
        return sum(self.head_bytes(kv_dtype))

    def sequence_bytes(self, row_bytes: int) -> int:
        """Return the bytes of one sequence's recurrent state, padded to rows of ``row_bytes``; 0 without a state."""
        return 0

    def weight_bytes(self, item_bytes: int) -> int:
        """Return the bytes of model weights that an R-worker keeps for this layer."""
        return 0

    @property
    def weight_rows(self) -> Shape | None:
        """The shape of one head's weights that R-workers multiply with; None if they need no weights of this layer."""
        return None

    def absorbed(self) -> Self:
        """Return a copy of this layer with absorbed queries, which R-workers score against cached rows directly."""
        return self

    def __repr__(self) -> str:
        fields = msgspec.structs.asdict(self).items()
        known = ", ".join(f"{name}={value!r}" for name, value in fields if not isinstance(value, bytes))
        return f"{type(self).__name__}({known})"

    def rewinds(self, num_rows: int) -> bool:
        """Return whether a sequence can drop the last ``num_rows`` tokens of a step, such as rejected draft tokens."""
        return True

    def cannot(self, way: Way) -> str | None:
        """Return why a model with such a layer does not support the feature ``way``; None if it does."""
        return None

    def cannot_lie_in(self, block_size: int) -> str | None:
        """Return why this layer cannot be cached in blocks of ``block_size`` tokens; None if it can."""
        return None
