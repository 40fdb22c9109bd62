"""How a query's attention is divided among the blocks of its context: requests to R-workers, answers for users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class AttentionSource(NamedTuple):
    """Tokens ``first`` to ``last`` (inclusive) of a context; ``weight``: the fraction of a row's attention on them."""

    first: int
    last: int
    weight: float


@dataclass(frozen=True)
class WeighedPart:
    """Cached tokens of a sequence on one R-worker to which a query attends: the whole sequence, or a segment.
    R-worker ``worker`` holds them as its sequence ``sequence_id``. ``offset``: position of the first token in the whole
    sequence. ``position``: the query's position, counted from ``offset``. ``num_tokens``: tokens up to the query.
    """

    worker: int
    sequence_id: int
    position: int
    offset: int
    num_tokens: int


@dataclass(frozen=True)
class WeighedRow:
    """Asks how the attention of row ``row`` of a mini-batch is divided among blocks of ``block`` tokens.
    ``layers``: in ascending order, with the index layers that they use. ``parts``: the row's whole context, in order.
    """

    mini_batch: int
    row: int
    block: int
    layers: tuple[int, ...]
    parts: tuple[WeighedPart, ...]

    @property
    def num_blocks(self) -> int:
        """The number of blocks from the sequence's first token to the row's own token."""
        last = self.parts[-1]
        return (last.offset + last.num_tokens - 1) // self.block + 1


@dataclass(frozen=True, eq=False)
class Weighing:
    """A request to one R-worker for the attention of one row.
    ``queries``: for each of ``layers`` [1, num_heads, query_dim] in the model's dtype. ``norms``: maximum and sum of
    scores over the whole context, float32 [1, heads of all attending layers, 2]; None if ``part`` and sinks are all of
    it. ``finds_norms``: return the norms of ``part`` without sinks, instead of weights.
    """

    part: WeighedPart
    block: int
    layers: tuple[int, ...]
    queries: tuple[np.ndarray, ...]
    norms: np.ndarray | None = None
    finds_norms: bool = False

    @property
    def first_block(self) -> int:
        """The index of the block, in the whole sequence, that holds the part's first token."""
        return self.part.offset // self.block

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the part's tokens touch."""
        return (self.part.offset + self.part.num_tokens - 1) // self.block - self.first_block + 1


class Queries(Protocol):
    """Access to the queries that a step has kept."""

    def of(self, mini_batch: int, row: int, layer: int) -> np.ndarray:
        """Return the queries of ``row`` in ``layer``, in the form sent to R-workers: [1, num_heads, query_dim]."""


def strongest(weights: np.ndarray, count: int, block: int, num_tokens: int) -> tuple[AttentionSource, ...]:
    """Return the ``count`` blocks of ``block`` tokens with the most attention, most first; ties in order of position.
    ``weights``: float32 [num_blocks], over ``num_tokens`` tokens. Blocks without attention are left out.
    """
    best = np.argsort(-weights, kind="stable")[:count]
    return tuple(
        AttentionSource(int(each) * block, min((int(each) + 1) * block, num_tokens) - 1, float(weights[each]))
        for each in best
        if weights[each] > 0
    )
