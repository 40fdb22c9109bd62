"""Records of who gets which rows of a mini-batch, and of how partial results are merged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Rows = slice | np.ndarray
"""Rows of an array: one slice where they follow one another, else int64 [num_rows]."""


@dataclass(frozen=True, eq=False)
class Route:
    """The rows of a mini-batch that one R-worker has a part in, in the order of its spans.

    ``q_rows``: of q, those of its READ, ATTEND and PARTIAL spans. ``kv_rows``: of k and v, those of its ATTEND, PARTIAL
    and APPEND spans. ``o_rows``: of o, which it fills, those of its ATTEND spans. ``num_partials``: rows of partial
    results that it answers with. Rows of q and o are counted over all attending rows, of k and v over all rows.
    """

    q_rows: Rows
    kv_rows: Rows
    o_rows: slice
    num_partials: int = 0

    @property
    def is_empty(self) -> bool:
        """True where it has no rows at all."""
        return not (count_rows(self.q_rows) or count_rows(self.kv_rows))


def count_rows(rows: Rows) -> int:
    """Number of rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


MERGED = np.dtype([("row", "<i8"), ("num_rows", "<i8"), ("first_part", "<i8"), ("num_parts", "<i8")])
"""``num_rows`` rows of a mini-batch's o, of which ``row`` is the first, merged from parts ``first_part`` on."""

PART = np.dtype([("worker", "<i8"), ("row", "<i8"), ("stride", "<i8"), ("split", "<i8"), ("num_splits", "<i8")])
"""R-worker ``worker``'s partial results ``row``, ``row`` + ``stride`` …: of ``num_splits`` splits from ``split`` on."""


@dataclass(frozen=True, eq=False)
class Merge:
    """How rows of o are merged from partial results.

    ``merged``: MERGED [num_merged]; ``parts``: PART [num_parts], those of one MERGED record together, in token order.
    """

    merged: np.ndarray
    parts: np.ndarray

    def with_part_of(self, worker: int) -> np.ndarray:
        """Whether R-worker ``worker`` has a part in them: bool [num_merged]."""
        owners = np.repeat(np.arange(len(self.merged)), self.merged["num_parts"])
        return np.isin(np.arange(len(self.merged)), owners[self.parts["worker"] == worker])

    def take(self, kept: np.ndarray) -> Merge:
        """Only the MERGED records where ``kept``, bool [num_merged], is true."""
        merged = self.merged[kept]
        parts = self.parts[np.repeat(kept, self.merged["num_parts"])]
        merged["first_part"] = np.cumsum(merged["num_parts"]) - merged["num_parts"]
        return Merge(merged, parts)


NO_MERGE = Merge(np.zeros(0, MERGED), np.zeros(0, PART))


@dataclass(frozen=True, eq=False)
class MiniBatchRoutes:
    """Who gets which rows of one mini-batch: ``workers``, a Route per R-worker, and how partial results are merged."""

    workers: tuple[Route, ...]
    merge: Merge = NO_MERGE
