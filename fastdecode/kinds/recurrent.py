"""Recurrent layers: a sequence keeps a state of fixed size, instead of keys and values of each token."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.kinds.kind import MAX_HEADS, HeadDim, Heads, LayerKind, Number, Shape, Way

KEEPS = "this model keeps a state per sequence"
RANGES = "this model keeps a state per range (kv_shard_tokens)"
HERE = "states that the S-worker keeps (state_on s)"

CANNOT: dict[Way, str] = {
    "tsp": f"{KEEPS} beside its cache: prefill workers pass it from part to part, as kvr does; leave it out",
    "states in ranges, ranks": f"{RANGES}, and ranks do not copy states; leave one of them out",
    "states in ranges, sessions": f"{RANGES}, and the next S-worker adopts one state per sequence; "
    "leave one of them out",
    "states in ranges, parking": f"{RANGES}, and disks keep one state per prefix; leave one of them out",
    "states in ranges, prefill workers": f"{RANGES}, and prefill workers store one state per prompt; "
    "leave one of them out",
    "states here, sessions": f"{HERE} reach the next one as files beside the journal, which R-workers cannot keep; "
    "give journal as a folder, or state_on r",
    "states here, parking": f"{HERE} are not on the disk of an R-worker, and its keys and values are of no use without "
    "them; give state_on r, or leave it out",
    "states here, prefill workers": "they send states to R-workers; with state_on s the S-worker keeps them, "
    "and it has no port for them; give state_on r, or leave it out",
    "states here, ranks": f"{HERE} belong to one process, and ranks are several; give state_on r, or leave it out",
    "states there, memory here": "this memory is for states that the S-worker keeps (state_on s); leave it out",
    "scratch": f"{KEEPS} beside its cache: its prompts attend where keys and values are, on R-workers; leave it out",
}
"""The reason for each engine feature that recurrent states do not support."""


class Recurrent(LayerKind, frozen=True, tag="recurrent"):
    """A recurrent layer. rworker/state_spec.hpp says how R-workers advance its state by a row.

    ``recurrence``: in this order, gated delta rule, Mamba-2's scan, a convolution alone, Mamba-1's scan, or a linear
    recurrence per channel. ``groups``: groups of heads with common queries and keys of ``key_dim``; both are 0 for
    "window", and 0 and 1 for "lru". ``taps``: tokens that the convolution before the recurrence sees. ``decays``: decay
    factors per head, 1 or ``key_dim``. ``silu``: whether SiLU follows the convolution. ``norm``: whether queries and
    keys are scaled to length 1. ``row_elements``: elements of a payload row in the model's dtype; a float32 takes two
    of 16 bits. ``filters``, ``bias``, ``skip``, ``factors``: arrays of float32 as bytes, or empty: [taps, channels],
    [channels], [heads], [key_dim, heads, value_dim] (only "selective"). ``kept_rows``: most rows of a step that
    TRUNCATE can take back; ``keeps_single``: also a step's only row. ``dtype``: dtype of the state's matrices, rounded
    after each token; convolutions keep float32.
    """

    kind = "recurrent"
    caches_rows = False
    num_kv_heads = 1

    num_heads: Heads
    value_head_dim: HeadDim
    scale: Number
    recurrence: Literal["delta", "scan", "window", "selective", "lru"]
    groups: Annotated[int, Meta(ge=0, le=MAX_HEADS)]
    key_dim: Annotated[int, Meta(ge=0, le=MAX_HEADS)]
    taps: Annotated[int, Meta(ge=1, le=16)]
    decays: Annotated[int, Meta(ge=0, le=MAX_HEADS)]
    silu: bool
    norm: bool
    row_elements: Annotated[int, Meta(ge=1, le=1 << 20)]
    filters: bytes = b""
    bias: bytes = b""
    skip: bytes = b""
    factors: bytes = b""
    kept_rows: Annotated[int, Meta(ge=0, le=1 << 12)] = 0
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    keeps_single: bool = False

    def __post_init__(self) -> None:
        force_setattr(self, "scale", float(self.scale))  # Layouts are compared as JSON text, in which 1 and 1.0 differ

    @property
    def row_shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        """See :class:`LayerKind`. The inputs of the recurrence for one token take the place of k; q and v are empty."""
        return (1, 0), (1, self.row_elements), (1, 0), (self.num_heads, self.value_head_dim)

    @property
    def partial_shape(self) -> Shape:
        """A placeholder, never used: a recurrent layer answers each row in full, also for a sequence in ranges."""
        return self.num_heads, 2 + self.value_head_dim

    @property
    def state_row_bytes(self) -> int:
        """Bytes of one row of a sequence's state, rounded up to whole cache lines."""
        # R-workers align each row of a state to a cache line of this many bytes
        line_bytes = 64
        return -(-self.value_head_dim * WIRE_DTYPE[self.dtype].itemsize // line_bytes) * line_bytes

    def sequence_bytes(self, row_bytes: int) -> int:
        """Return the bytes of one sequence's state in rows of ``row_bytes``: see rworker/state_places.hpp."""
        taps = 2 * self.groups * -(-4 * self.key_dim // row_bytes)
        taps += self.num_heads * -(-4 * self.value_head_dim // row_bytes)
        return row_bytes * ((self.taps - 1) * taps + self.num_heads * self.key_dim)

    def rewinds(self, num_rows: int) -> bool:
        return num_rows <= self.kept_rows

    def cannot(self, way: Way) -> str | None:
        return CANNOT.get(way)
