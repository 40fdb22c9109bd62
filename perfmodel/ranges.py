"""What it costs that a sequence attends in ranges on several R-workers, besides reading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.core.types import ITEM_BYTES, SPLIT_TOKENS
from fastdecode.perfmodel.model_shape import ModelShape

PARTIAL_BYTES = ITEM_BYTES["float32"]
"""Of each number of a partial result: a maximum, a sum, and the output that is not yet divided by it."""

COPIED_BYTES_PER_SECOND = 12e9
"""Of queries that are copied beside an R-worker's own, and of partial results that come in: by one thread, on Zen 4."""

MERGE_CALL_SECONDS = 30e-6
"""Of a layer's queries and partial results, whatever their number; and of each partial result, which is of one row and
head and takes an exponential, ``MERGED_SECONDS``: measured on Zen 4."""

MERGED_SECONDS = 28e-9


class RangeParts(NamedTuple):
    """Of one step: ``num_reads`` rows whose queries go to a closed range, and ``num_partials`` rows of partial results
    that come back, those of tails included."""

    num_reads: float = 0.0
    num_partials: float = 0.0

    def over(self, num_mini_batches: int) -> RangeParts:
        """Of each mini-batch."""
        return RangeParts(self.num_reads / num_mini_batches, self.num_partials / num_mini_batches)


NO_RANGES = RangeParts()


@dataclass(frozen=True)
class RangeRates:
    """``query_bytes``, ``partial_bytes`` and ``merged_seconds``: of one row and layer. ``slowness``: how many times as
    slow the S-worker is as when the rates were measured. Nothing is counted where nothing is known."""

    query_bytes: float = 0.0
    partial_bytes: float = 0.0
    merged_seconds: float = 0.0
    call_seconds: float = 0.0
    slowness: float = 1.0

    @staticmethod
    def of(shape: ModelShape, slowness: float = 1.0) -> RangeRates:
        """For the heads of ``shape``, which are a rank's own under tensor parallelism."""
        query, partial = shape.head_dim * shape.item_bytes, (2 + shape.head_dim) * PARTIAL_BYTES
        heads = shape.num_heads
        return RangeRates(heads * query, heads * partial, heads * MERGED_SECONDS, MERGE_CALL_SECONDS, slowness)

    def link_bytes(self, parts: RangeParts) -> float:
        """Beyond the rows' own q, k, v and o, of one layer."""
        return parts.num_reads * self.query_bytes + parts.num_partials * self.partial_bytes

    def merge_seconds(self, parts: RangeParts, num_rows: float) -> float:
        """On the S-worker, of one layer and call of ``num_rows`` rows: queries of closed ranges are put before an
        R-worker's own, and partial results are taken in and merged."""
        if not parts.num_partials:
            return 0.0
        copied = (parts.num_reads + num_rows) * self.query_bytes + parts.num_partials * self.partial_bytes
        merged = parts.num_partials * self.merged_seconds
        return self.slowness * (self.call_seconds + merged + copied / COPIED_BYTES_PER_SECOND)


def tail_partials(num_tokens: int) -> int:
    """Partial results of a row of a tail of so many tokens: one per aligned power of two of splits (its bits)."""
    return bin(-(-num_tokens // SPLIT_TOKENS)).count("1")


def mean_parts(num_sequences: float, context: float, range_tokens: float) -> RangeParts:
    """Of ``num_sequences`` rows over ``context`` tokens each, their tails of any length."""
    if context < range_tokens:
        return NO_RANGES
    closed = context // range_tokens
    splits = range(1, int(range_tokens // SPLIT_TOKENS) + 1)
    tail = sum(tail_partials(each * SPLIT_TOKENS) for each in splits) / len(splits)
    return RangeParts(num_sequences * closed, num_sequences * (closed + tail))
