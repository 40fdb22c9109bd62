"""Layers of multi-head latent attention (MLA): a token leaves one row, whose first elements are its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Self

import msgspec
import numpy as np
from msgspec.structs import replace

from fastdecode.core.dtypes import is_quantized, row_bytes
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.kind import HeadDim, Shape

FRAME_BYTES = 1 << 22
"""Most bytes of weights that are sent to an R-worker in one frame. One head's weights take fewer bytes."""

Weights = Callable[[], np.ndarray]
"""Returns the K and V projections of all heads, [num_heads, nope_dim + value_dim, rank], in the model's dtype."""


class Absorption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a latent layer's K and V projections if R-workers multiply with them (``--latent-absorption r``).

    A head's query has ``nope_dim`` elements and then the rotary ones. R-workers multiply the first ``nope_dim`` by K,
    which gives as many elements as a latent has. They multiply the head's output over latents by V, which gives
    ``value_dim``.
    """

    nope_dim: HeadDim
    value_dim: HeadDim


class Latent(Attending, frozen=True, tag="latent"):
    """A layer that caches one row, the key, per token and KV head; the row's first elements are also the value.

    The value has ``value_head_dim`` elements. Caches of int8 and int4 quantize these elements, and store each of the
    others in 16 bits. ``absorption`` is None if the S-worker absorbs queries and expands outputs. Cached rows are the
    same in both cases.
    """

    kind = "latent"
    values_in_keys = True

    absorption: Absorption | None = None

    @property
    def query_dim(self) -> int:
        if self.absorption:
            return self.absorption.nope_dim + self.key_head_dim - self.value_head_dim
        return self.key_head_dim

    @property
    def output_dim(self) -> int:
        return self.absorption.value_dim if self.absorption else self.value_head_dim

    def head_bytes(self, kv_dtype: str) -> tuple[int, int]:
        if is_quantized(kv_dtype):
            return row_bytes(self.value_head_dim, kv_dtype) + 2 * (self.key_head_dim - self.value_head_dim), 0
        return row_bytes(self.key_head_dim, kv_dtype), 0

    def weight_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the K and V projections that an R-worker keeps, each output padded to 16 elements."""
        if self.absorption is None:
            return 0
        rank = self.value_head_dim
        keys = self.absorption.nope_dim * -(-rank // 16) * 16
        values = rank * -(-self.absorption.value_dim // 16) * 16
        return self.num_heads * (keys + values) * item_bytes

    @property
    def weight_rows(self) -> Shape | None:
        if self.absorption is None:
            return None
        return self.absorption.nope_dim + self.absorption.value_dim, self.value_head_dim

    def absorbed(self) -> Self:
        return replace(self, absorption=None)


def weight_parts(weights: Weights) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index of the first head, weight rows of the heads in this piece); a piece has at most FRAME_BYTES."""
    rows = weights()
    count = max(1, FRAME_BYTES // max(rows[0].nbytes, 1))
    for first in range(0, len(rows), count):
        yield first, np.ascontiguousarray(rows[first : first + count])
