"""A sequence is a list of segments, each with the copies that exist of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(eq=False, slots=True)
class Block:
    """A full block with more than one possible holder: running sequences, and retained prefixes."""

    num_sequences: int = 1
    num_prefixes: int = 0


@dataclass(eq=False, slots=True)
class Copy:
    """The keys and values of a segment on one R-worker.

    Its first blocks are ``shared`` with the prefix cache or with other sequences, and retained as ``prefix_id``.
    """

    worker: int
    shared: list[Block] = field(default_factory=list)
    prefix_id: int | None = None

    def share(self, num_blocks: int) -> list[Block]:
        """Return its first ``num_blocks`` full blocks, which others may hold from now on."""
        self.shared += [Block() for _ in range(num_blocks - len(self.shared))]
        return self.shared[:num_blocks]


class Columns(Protocol):
    """Columns of a table with a row for each sequence that holds a cache, int64 [num_rows]: the counts of its tail, the
    R-worker of the tail's first copy, and its last token."""

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
"""The cache id of a segment until the store names it."""


class Segment:
    """Consecutive tokens of a sequence, which R-workers know as a sequence named ``cache_id``.

    They begin at token ``start``; each of ``copies`` has all of them. The first copy is the segment's home; where there
    is none, the segment is lost or has no place yet. ``num_tokens`` are cached, in ``num_blocks`` blocks on each
    R-worker; blocks are held for tokens that come soon as well. The counts of a segment that grows stand in the row of
    a table to which it is bound: thousands of them advance as arrays.
    """

    __slots__ = ("_columns", "_num_blocks", "_num_tokens", "_row", "cache_id", "copies", "start")

    def __init__(self, cache_id: int, start: int = 0, num_blocks: int = 0, workers: Iterable[int] = ()) -> None:
        self.cache_id, self.start, self.copies = cache_id, start, [Copy(worker) for worker in workers]
        self._num_tokens, self._num_blocks = 0, num_blocks
        self._columns: Columns | None = None
        self._row = -1

    @property
    def num_tokens(self) -> int:
        """Tokens that are cached."""
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
        """Blocks held on each R-worker that has a copy."""
        return self._num_blocks if self._columns is None else int(self._columns.num_blocks[self._row])

    @num_blocks.setter
    def num_blocks(self, value: int) -> None:
        self._num_blocks = value
        if self._columns is not None:
            self._columns.num_blocks[self._row] = value

    @property
    def workers(self) -> list[int]:
        """The R-workers that have a copy, the home first."""
        return [copy.worker for copy in self.copies]

    @property
    def home(self) -> int:
        """The R-worker of the first copy; -1: there is none."""
        return self.copies[0].worker if self.copies else -1

    @property
    def twice(self) -> bool:
        """True if two R-workers have a copy."""
        return len(self.copies) > 1

    def on(self, worker: int) -> Copy | None:
        """Return the copy on R-worker ``worker``, if there is one."""
        return next((copy for copy in self.copies if copy.worker == worker), None)

    def bind(self, columns: Columns, row: int) -> None:
        """From here on the counts stand in ``row`` of ``columns``."""
        num_tokens, num_blocks = self.num_tokens, self.num_blocks
        self._columns, self._row = columns, row
        self.num_tokens, self.num_blocks = num_tokens, num_blocks

    def release(self) -> None:
        """The segment keeps its counts, and its row is another's from here on."""
        self._num_tokens, self._num_blocks = self.num_tokens, self.num_blocks
        self._columns, self._row = None, -1
