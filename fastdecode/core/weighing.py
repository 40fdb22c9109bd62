"""The attention of one query, shared among blocks of its context: questions to R-workers, and answers for users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class AttentionSource(NamedTuple):
    """Consecutive tokens of a context, the last one included, and the share of a token's attention that they have."""

    first: int
    last: int
    weight: float


@dataclass(frozen=True)
class WeighedPart:
    """Tokens of a sequence on one R-worker that a query sees: all of them, or a range.

    ``sequence_id``: what R-worker ``worker`` calls them. ``offset``: the first one's place in the sequence.
    ``position``: the query's, counted from there. ``num_tokens``: those up to the query.
    """

    worker: int
    sequence_id: int
    position: int
    offset: int
    num_tokens: int


@dataclass(frozen=True)
class WeighedRow:
    """Row ``row`` of a mini-batch of the open step, whose attention is to be shared among blocks of ``block`` tokens.

    ``layers``: ascending, with the index layers that some of them read. ``parts``: all that the row sees, in order.
    """

    mini_batch: int
    row: int
    block: int
    layers: tuple[int, ...]
    parts: tuple[WeighedPart, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks from the sequence's first token to the row's own."""
        last = self.parts[-1]
        return (last.offset + last.num_tokens - 1) // self.block + 1


@dataclass(frozen=True, eq=False)
class Weighing:
    """A question to one R-worker about a row.

    ``queries``: of each of ``layers`` [1, num_heads, query_dim] in the model's dtype. ``norms``: max and sum of scores
    over all parts, float32 [1, heads of all layers that attend, 2]; None: R-workers take those of ``part`` and of
    sinks. ``finds_norms``: these are asked for, without sinks, and no weights.
    """

    part: WeighedPart
    block: int
    layers: tuple[int, ...]
    queries: tuple[np.ndarray, ...]
    norms: np.ndarray | None = None
    finds_norms: bool = False

    @property
    def first_block(self) -> int:
        """The block of the part's first token."""
        return self.part.offset // self.block

    @property
    def num_blocks(self) -> int:
        """Blocks that the part's tokens touch."""
        return (self.part.offset + self.part.num_tokens - 1) // self.block - self.first_block + 1


class Queries(Protocol):
    """The queries of the rows that a step taps."""

    def of(self, mini_batch: int, row: int, layer: int) -> np.ndarray:
        """Return the row's queries in ``layer``, as they travel: [1, num_heads, query_dim] in the model's dtype."""


def strongest(weights: np.ndarray, count: int, block: int, num_tokens: int) -> tuple[AttentionSource, ...]:
    """Return the ``count`` blocks with the most attention, the strongest first, equal ones in order.

    ``weights``: float32 [num_blocks] of ``num_tokens`` tokens. Blocks without any are left out.
    """
    best = np.argsort(-weights, kind="stable")[:count]
    return tuple(
        AttentionSource(int(each) * block, min((int(each) + 1) * block, num_tokens) - 1, float(weights[each]))
        for each in best
        if weights[each] > 0
    )
