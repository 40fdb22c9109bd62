"""The base of all kinds of layers: the questions that the rest of the house asks of a layer, whatever its kind.

A kind is one frozen msgspec struct. It is the layout that both sides agree on and the message that carries it, and the
C++ R-worker reads its fields by their names (rworker_cpp/include/rworker/kinds).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta

MAX_HEAD_DIM = 1088
"""Most elements of a key, or a value, in one head."""

MAX_LAYERS = 4096
MAX_HEADS = 1 << 12
MAX_NUMBER = float(np.finfo(np.float32).max)
"""R-workers compute with float32."""

MAX_PICK_BLOCK = 512
"""Most tokens of a block that an index picks whole: those of a split (``SPLIT_TOKENS``)."""

Heads = Annotated[int, Meta(ge=1, le=MAX_HEADS)]
HeadDim = Annotated[int, Meta(ge=1, le=MAX_HEAD_DIM)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MAX_HEADS)]

Shape = tuple[int, int]
"""Heads, and elements of each, of a row."""

Way = Literal[
    "ranges", "ranks", "parking", "prefill workers", "tsp", "gpu", "scratch", "early-exit drafts", "sessions", "copies",
    "moves", "states", "states here", "states here, sessions", "states here, prefill workers", "states here, ranks",
    "states there, memory here",
]  # fmt: skip
"""What an engine may do with a model's layers, and some kinds cannot be put through.

ranges: a sequence lies on several R-workers. ranks: several S-workers share each layer. parking: prefixes lie on
disks. tsp: every prefill worker computes with all keys of a prompt. scratch: prompts attend on the S-worker. early-exit
drafts: the first layers draft. sessions: R-workers keep sequences for the next engine. copies: a second R-worker has a
sequence too. moves: sequences move between R-workers. states: settings say how
states are kept. states here: the S-worker keeps them, and what that is
beside. states there, memory here: memory is set aside on the S-worker for states that R-workers keep.
"""


class LayerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", cache_hash=True):
    """A layer as R-workers are told it; the answers here are those of a layer that caches rows and attends to them."""

    kind: ClassVar[str]
    """The kind's name, on the wire and in C++."""

    caches_rows: ClassVar[bool] = True
    """True if a cached token leaves a row of its own; False if a sequence leaves a state."""

    ranks_tokens: ClassVar[bool] = False
    """True if a layer answers which tokens the layers after it see, and attends to nothing."""

    values_in_keys: ClassVar[bool] = False
    """True if values are the first elements of the keys, and neither travel nor are stored."""

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
        """The layer before it whose picks its queries see; -1 if they see all tokens."""
        return -1

    def reading(self, index: int) -> Self:
        """Return the same layer where its queries see what layer ``index`` picks, if they heed any."""
        return self

    @property
    def block_tokens(self) -> int:
        """Tokens of which blocks of the cache must be divisors; 0 if any will do."""
        return 0

    @property
    def chunk_tokens(self) -> int:
        """Tokens of which ranges must be whole multiples, so that attention chunks begin alike in each."""
        return 1

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that one cached token holds."""
        return 0

    def multiply_adds(self) -> int:
        """Return the multiply-adds of one query row for each cached token that it reads."""
        return 0

    def head_bytes(self, kv_dtype: str) -> tuple[int, int]:
        """Return the bytes of one cached token's K, and of its V, of one head, each with its scales."""
        return 0, 0

    def token_bytes(self, kv_dtype: str) -> int:
        """Return the bytes of K, V and their scales that one cached token takes."""
        return sum(self.head_bytes(kv_dtype))

    def sequence_bytes(self, row_bytes: int) -> int:
        """Return the bytes that a sequence takes beside its tokens, in rows of ``row_bytes``; 0 without a state."""
        return 0

    def weight_bytes(self, item_bytes: int) -> int:
        """Return the bytes of weights of the model that an R-worker keeps for this layer."""
        return 0

    @property
    def weight_rows(self) -> Shape | None:
        """Shape of one head's weights that an R-worker multiplies with, None if it has none."""
        return None

    def absorbed(self) -> Self:
        """Return the same layer with queries that come as they are scored, as those of prefill workers do."""
        return self

    def __repr__(self) -> str:
        fields = msgspec.structs.asdict(self).items()
        known = ", ".join(f"{name}={value!r}" for name, value in fields if not isinstance(value, bytes))
        return f"{type(self).__name__}({known})"

    def rewinds(self, num_rows: int) -> bool:
        """Return whether a sequence can go back by ``num_rows`` rows that a step has written."""
        return True

    def cannot(self, way: Way) -> str | None:
        """Return why a model with such a layer cannot be put through ``way``; None if it can."""
        return None

    def cannot_lie_in(self, block_size: int) -> str | None:
        """Return why such a layer cannot be cached in blocks of ``block_size`` tokens; None if it can."""
        return None
