"""The base of all kinds of layers: what the other packages ask of a layer, whatever its kind.

A kind is one frozen msgspec struct. It is the layout that both sides agree on, and the message that carries it. The C++
R-worker reads its fields by name (rworker_cpp/include/rworker/kinds).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta

MAX_HEAD_DIM = 1088
"""Most elements of a key or value in one head."""

MAX_LAYERS = 4096
MAX_HEADS = 1 << 12
MAX_NUMBER = float(np.finfo(np.float32).max)
"""Largest finite number of R-workers, which compute in float32."""

MAX_PICK_BLOCK = 512
"""Most tokens of a block that an index picks whole: one split (``SPLIT_TOKENS``)."""

Heads = Annotated[int, Meta(ge=1, le=MAX_HEADS)]
HeadDim = Annotated[int, Meta(ge=1, le=MAX_HEAD_DIM)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MAX_HEADS)]

Shape = tuple[int, int]
"""Heads of a row, and elements of each head."""

Way = Literal[
    "ranges", "ranks", "parking", "prefill workers", "tsp", "gpu", "scratch", "early-exit drafts", "sessions", "copies",
    "moves", "states", "states here", "states here, sessions", "states here, prefill workers", "states here, ranks",
    "states there, memory here",
]  # fmt: skip
"""A feature of the engine that some kinds of layers do not support.

ranges: a sequence is cached on several R-workers. ranks: several S-workers share each layer. parking: prefixes are kept
on disks. tsp: every prefill worker computes with all keys of a prompt. scratch: prompts attend on the S-worker.
early-exit drafts: the first layers draft. sessions: R-workers keep sequences for the next engine. copies: a second
R-worker holds a sequence too. moves: sequences move between R-workers. states: settings say how states are kept. states
here: the S-worker keeps them. states there, memory here: the S-worker sets memory aside for states that R-workers keep.
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
    def row_shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        """Shapes of a row of q, k, v and o."""
        raise NotImplementedError

    @property
    def partial_shape(self) -> Shape:
        """Shape of a row of partial results of a sequence in ranges, 4 bytes an element."""
        raise NotImplementedError

    @property
    def reads(self) -> int:
        """The earlier layer that picks the tokens its queries see; -1 if they see all."""
        return -1

    def reading(self, index: int) -> Self:
        """Return the layer with its queries limited to the picks of layer ``index``, if it supports that."""
        return self

    @property
    def block_tokens(self) -> int:
        """Tokens that the block size must divide; 0 for any block size."""
        return 0

    @property
    def chunk_tokens(self) -> int:
        """Tokens of which ranges must be multiples, so that attention chunks begin alike in each."""
        return 1

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that one cached token holds."""
        return 0

    def multiply_adds(self) -> int:
        """Return the multiply-adds of one query row for each cached token that it reads."""
        return 0

    def head_bytes(self, kv_dtype: str) -> tuple[int, int]:
        """Return the bytes of one cached token's K, and of its V, of one head, with scales."""
        return 0, 0

    def token_bytes(self, kv_dtype: str) -> int:
        """Return the bytes of one cached token's K and V with scales, over all heads."""
        return sum(self.head_bytes(kv_dtype))

    def sequence_bytes(self, row_bytes: int) -> int:
        """Return the bytes of a sequence in addition to its tokens, in rows of ``row_bytes``; 0 without a state."""
        return 0

    def weight_bytes(self, item_bytes: int) -> int:
        """Return the bytes of model weights that an R-worker keeps for this layer."""
        return 0

    @property
    def weight_rows(self) -> Shape | None:
        """Shape of one head's weights that an R-worker multiplies with; None if it has none."""
        return None

    def absorbed(self) -> Self:
        """Return the layer with queries in the form in which they are scored, as prefill workers send them."""
        return self

    def __repr__(self) -> str:
        fields = msgspec.structs.asdict(self).items()
        known = ", ".join(f"{name}={value!r}" for name, value in fields if not isinstance(value, bytes))
        return f"{type(self).__name__}({known})"

    def rewinds(self, num_rows: int) -> bool:
        """Return whether a sequence can go back by ``num_rows`` rows that a step has written."""
        return True

    def cannot(self, way: Way) -> str | None:
        """Return why a model with such a layer does not support the feature ``way``; None if it does."""
        return None

    def cannot_lie_in(self, block_size: int) -> str | None:
        """Return why such a layer cannot be cached in blocks of ``block_size`` tokens; None if it can."""
        return None
