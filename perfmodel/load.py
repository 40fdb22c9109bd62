"""The load of one step: all that the cost of a step depends on, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fastdecode.core.placing import Placing
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import SPLIT_TOKENS


class RangeParts(NamedTuple):
    """The rows of a step that ranges make: ``reads`` are queries that go to a closed range, ``partials`` are partial
    results that come back, those of tails included."""

    reads: float = 0.0
    partials: float = 0.0


NO_RANGES = RangeParts()


@dataclass(frozen=True)
class Load:
    """The numbers of one step over all its mini-batches and R-workers; a mean step has fractions.

    The S-worker computes ``rows``. Only ``sampled`` of them attend on R-workers and meet the head and the host; the
    others are prompts', which attend on the S-worker. R-workers read ``kv_tokens`` cached tokens. ``reads`` and
    ``partials``: see ``RangeParts``. ``copied_rows``: rows that a second R-worker stores too.
    """

    rows: float
    sampled: float
    kv_tokens: float
    reads: float = 0.0
    partials: float = 0.0
    copied_rows: float = 0.0

    @staticmethod
    def decode(rows: float, kv_tokens: float) -> Load:
        """Return the load of a step whose rows are all sampled, without ranges and second copies."""
        return Load(rows, rows, kv_tokens)

    @staticmethod
    def of(step: ScheduledStep, sampled: float, kv_tokens: float) -> Load:
        """Return the load of a scheduled step; drafts and shared readings decide ``sampled`` and ``kv_tokens``."""
        return Load(step.num_tokens, sampled, kv_tokens, *_range_parts(step), _copied_rows(step))

    def with_ranges(self, parts: RangeParts) -> Load:
        """Return this load with the reads and partial results of ``parts``."""
        return replace(self, reads=parts.reads, partials=parts.partials)


def tail_partials(num_tokens: int) -> int:
    """Return the partial results of a row of a tail of so many tokens: one per aligned power of two of splits."""
    return bin(-(-num_tokens // SPLIT_TOKENS)).count("1")


def mean_parts(num_rows: float, context: float, placing: Placing) -> RangeParts:
    """Return the reads and partial results of ``num_rows`` rows over ``context`` tokens each, with tails of any length.

    A sequence is cut into ranges as ``placing`` says, the last of which is its tail.
    """
    length = placing.segment_tokens
    if context < length:
        return NO_RANGES
    closed = context // length
    splits = range(1, length // SPLIT_TOKENS + 1)
    tail = sum(tail_partials(each * SPLIT_TOKENS) for each in splits) / len(splits)
    return RangeParts(num_rows * closed, num_rows * (closed + tail))


def _copied_rows(step: ScheduledStep) -> int:
    return sum(int(each.chunks["num_rows"][each.chunks["copy"] >= 0].sum()) for each in step.mini_batches)


def _range_parts(step: ScheduledStep) -> RangeParts:
    reads = tails = 0
    for mini_batch in step.mini_batches:
        chunks = mini_batch.chunks
        reads += int(chunks["num_rows"][mini_batch.reads["chunk"]].sum())
        for chunk in chunks[chunks["attends"] & (chunks["base"] > 0)] if len(mini_batch.reads) else ():
            local = int(chunk["context_len"] - chunk["base"] + chunk["num_rows"])
            tails += int(chunk["num_rows"]) * tail_partials(local)
    return RangeParts(reads, reads + tails)
