"""The place of a sequence's cache: a list of segments, each with copies on R-workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(eq=False, slots=True)
class Block:
    """A full KV block, with the numbers of sequences and of retained prefixes that use it."""

    num_sequences: int = 1
    num_prefixes: int = 0


@dataclass(eq=False, slots=True)
class Copy:
    """The keys and values of a segment on one R-worker.
    ``shared``: the copy's first blocks, which other sequences or the prefix cache use too. The prefix cache retains
    them as ``prefix_id``.
    """

    worker: int
    shared: list[Block] = field(default_factory=list)
    prefix_id: int | None = None

    def share(self, num_blocks: int) -> list[Block]:
        """Return the first ``num_blocks`` full blocks of this copy as ``Block`` objects, which others may use too."""
        self.shared += [Block() for _ in range(num_blocks - len(self.shared))]
        return self.shared[:num_blocks]


class Columns(Protocol):
    """The interface of a table with one row per cached sequence; each column is int64 [num_rows].
    The columns describe the last segment of a sequence (first position, blocks, R-worker) and the sequence (cached
    tokens, last token).
    """

    @property
    def num_cached(self) -> np.ndarray: ...

    @property
    def bases(self) -> np.ndarray: ...

    @property
    def num_blocks(self) -> np.ndarray: ...

    @property
    def homes(self) -> np.ndarray: ...

    @property
    def last_tokens(self) -> np.ndarray: ...


UNNAMED = 0
"""The cache id of a segment before the store assigns one."""


class Segment:
    """Consecutive tokens of a sequence, which R-workers hold as their own sequence ``cache_id``.
    The tokens begin at ``start``; each of ``copies`` holds all of them. The R-worker of the first copy is called home.
    A segment without copies is lost, or not placed yet. ``num_tokens`` tokens are cached, in ``num_blocks`` blocks per
    R-worker, some of them for coming tokens. While a segment grows, a row of a table holds these two numbers, so that
    thousands of segments can advance as arrays.
    """

    __slots__ = ("_columns", "_num_blocks", "_num_tokens", "_row", "cache_id", "copies", "start")

    def __init__(self, cache_id: int, start: int = 0, num_blocks: int = 0, workers: Iterable[int] = ()) -> None:
        self.cache_id, self.start, self.copies = cache_id, start, [Copy(worker) for worker in workers]
        self._num_tokens, self._num_blocks = 0, num_blocks
        self._columns: Columns | None = None
        self._row = -1

    @property
    def num_tokens(self) -> int:
        """The number of cached tokens in the segment."""
        if self._columns is None:
            return self._num_tokens
        return int(self._columns.num_cached[self._row] - self._columns.bases[self._row])

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        self._num_tokens = value
        if self._columns is not None:
            self._columns.num_cached[self._row] = self.start + value

    @property
    def num_blocks(self) -> int:
        """The segment's number of blocks on each R-worker with a copy."""
        return self._num_blocks if self._columns is None else int(self._columns.num_blocks[self._row])

    @num_blocks.setter
    def num_blocks(self, value: int) -> None:
        self._num_blocks = value
        if self._columns is not None:
            self._columns.num_blocks[self._row] = value

    @property
    def workers(self) -> list[int]:
        """The indices of the R-workers with a copy, the first copy's first."""
        return [copy.worker for copy in self.copies]

    @property
    def home(self) -> int:
        """The index of the R-worker with the first copy; -1 if there is no copy."""
        return self.copies[0].worker if self.copies else -1

    @property
    def twice(self) -> bool:
        """True if two R-workers have a copy."""
        return len(self.copies) > 1

    def on(self, worker: int) -> Copy | None:
        """Return the copy on R-worker ``worker``, or None if there is none."""
        return next((copy for copy in self.copies if copy.worker == worker), None)

    def bind(self, columns: Columns, row: int) -> None:
        """From now on, keep the numbers of tokens and blocks in ``row`` of ``columns``, until ``release``."""
        num_tokens, num_blocks = self.num_tokens, self.num_blocks
        self._columns, self._row = columns, row
        self.num_tokens, self.num_blocks = num_tokens, num_blocks

    def release(self) -> None:
        """Keep the numbers of tokens and blocks here again, so that another segment can use the table row."""
        self._num_tokens, self._num_blocks = self.num_tokens, self.num_blocks
        self._columns, self._row = None, -1
