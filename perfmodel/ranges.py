"""What it costs that a sequence attends in ranges on several R-workers, besides reading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.types import ITEM_BYTES, SPLIT_TOKENS

PARTIAL_BYTES = ITEM_BYTES["float32"]
"""Of each number of a partial result: a maximum, a sum, and the output that is not yet divided by it."""

MERGED_BYTES_PER_SECOND = 12e9
"""Of partial results, by one thread, and ``MERGE_CALL_SECONDS`` for a layer's call: measured on Zen 4."""

MERGE_CALL_SECONDS = 20e-6


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
    """``query_bytes`` and ``partial_bytes``: of one row and layer. Nothing is counted where nothing is known."""

    query_bytes: float = 0.0
    partial_bytes: float = 0.0
    merged_bytes_per_second: float = MERGED_BYTES_PER_SECOND
    call_seconds: float = 0.0

    @staticmethod
    def of(shape: ModelShape) -> RangeRates:
        """For the heads of ``shape``, which are a rank's own under tensor parallelism."""
        query, partial = shape.head_dim * shape.item_bytes, (2 + shape.head_dim) * PARTIAL_BYTES
        return RangeRates(shape.num_heads * query, shape.num_heads * partial, call_seconds=MERGE_CALL_SECONDS)

    def link_bytes(self, parts: RangeParts) -> float:
        """Beyond the rows' own q, k, v and o, of one layer."""
        return parts.num_reads * self.query_bytes + parts.num_partials * self.partial_bytes

    def merge_seconds(self, parts: RangeParts) -> float:
        """On the S-worker, of one layer and call."""
        if not parts.num_partials:
            return 0.0
        return self.call_seconds + parts.num_partials * self.partial_bytes / self.merged_bytes_per_second


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
