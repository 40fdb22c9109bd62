"""The load of one step: all that the cost of a step depends on, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.core.step import ScheduledStep
from fastdecode.perfmodel.ranges import RangeParts, tail_partials


@dataclass(frozen=True)
class Load:
    """The numbers of one step over all its mini-batches and R-workers; a mean step has fractions.

    The S-worker computes ``rows``. Only ``sampled`` of them attend on R-workers and meet the head and the host; the
    others are prompts', which attend on the S-worker. R-workers read ``kv_tokens`` cached tokens. ``reads``: queries
    that go to a closed range. ``partials``: rows of partial results that come back, those of tails included.
    ``copied_rows``: rows that a second R-worker stores too.
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
        parts = _range_parts(step)
        return Load(step.num_tokens, sampled, kv_tokens, parts.num_reads, parts.num_partials, _copied_rows(step))

    @property
    def ranges(self) -> RangeParts:
        """The queries and partial results of sequences with several ranges."""
        return RangeParts(self.reads, self.partials)

    def with_ranges(self, parts: RangeParts) -> Load:
        """Return this load with the reads and partial results of ``parts``."""
        return replace(self, reads=parts.num_reads, partials=parts.num_partials)


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
