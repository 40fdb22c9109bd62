"""K and V of latent attention, where R-workers multiply them with queries and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FRAME_BYTES = 1 << 22
"""Most bytes of weights that travel, or are made ready, at a time; one head's are fewer."""


def _no_weights() -> np.ndarray:
    raise ValueError("these are the sizes of K and V alone, as an R-worker is told them; their weights come apart")


@dataclass(frozen=True)
class Absorption:
    """K and V of a latent layer, multiplied by R-workers (``--latent-absorption r``).

    A head's query is [nope_dim + rope]: its first part, times K, becomes as long as a latent. Its output over latents,
    times V, becomes [value_dim]. ``weights()``: K above V of each head, [num_heads, nope_dim + value_dim, rank], in the
    model's dtype as it travels.
    """

    nope_dim: int
    value_dim: int
    weights: Callable[[], np.ndarray] = field(default=_no_weights, compare=False, repr=False)

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """The weights in pieces of at most FRAME_BYTES, C-contiguous: the first head of each, and its heads' rows."""
        rows = self.weights()
        count = max(1, FRAME_BYTES // max(rows[0].nbytes, 1))
        for first in range(0, len(rows), count):
            yield first, np.ascontiguousarray(rows[first : first + count])


def weight_bytes(layer: Any, item_bytes: int) -> int:
    """Bytes of K and V that an R-worker keeps of ``layer``, a ``LayerLayout``: outputs in whole lines of 16."""
    absorption, rank = layer.absorption, layer.value_head_dim
    if absorption is None:
        return 0
    keys, values = absorption.nope_dim * -(-rank // 16) * 16, rank * -(-absorption.value_dim // 16) * 16
    return int(layer.num_heads * (keys + values) * item_bytes)
