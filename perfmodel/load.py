"""The load of one step: the numbers on which the cost of a step depends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

from fastdecode.core.placing import Placing
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import SPLIT_TOKENS


class RangeParts(NamedTuple):
    """Additional work of a step for sequences that are split into ranges of tokens on several R-workers.

    ``reads``: queries sent to full ranges. ``partials``: partial results that return, also from the last ranges.
    """

    reads: float = 0.0
    partials: float = 0.0


NO_RANGES = RangeParts()


@dataclass(frozen=True)
class Load:
    """The load of one step over all its mini-batches and R-workers. A mean step has fractions.
    The S-worker computes ``rows``. Only ``sampled`` rows attend on R-workers, and cost head and host time; the other
    rows are of prompts and attend on the S-worker. R-workers read ``kv_tokens`` cached tokens. ``reads``, ``partials``:
    see ``RangeParts``. ``copied_rows``: rows that a second R-worker stores too.
    """

    rows: float
    sampled: float
    kv_tokens: float
    reads: float = 0.0
    partials: float = 0.0
    copied_rows: float = 0.0

    @staticmethod
    def decode(rows: float, kv_tokens: float) -> Load:
        """Return the load of a decode step: all ``rows`` are sampled, and no sequence has ranges or second copies."""
        return Load(rows, rows, kv_tokens)

    @staticmethod
    def of(step: ScheduledStep, sampled: float, kv_tokens: float) -> Load:
        """Return the load of the scheduled ``step``. The caller passes sampled rows and cached tokens."""
        return Load(step.num_tokens, sampled, kv_tokens, *_range_parts(step), _copied_rows(step))

    def with_ranges(self, parts: RangeParts) -> Load:
        """Return a copy of this load with ``reads`` and ``partials`` of ``parts``."""
        return replace(self, reads=parts.reads, partials=parts.partials)


def tail_partials(num_tokens: int) -> int:
    """Return the partial results per row of a tail of ``num_tokens``: one per binary 1 in its number of splits."""
    return bin(-(-num_tokens // SPLIT_TOKENS)).count("1")


def mean_parts(num_rows: float, context: float, placing: Placing) -> RangeParts:
    """Return the range work of ``num_rows`` rows over ``context`` tokens, averaged over lengths of the last range.

    Sequences are cut into ranges as ``placing`` says; the last range is the tail.
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


def expected_largest(number: float) -> float:
    """Return the expected largest of ``number`` standard normal values: 0 for one, 1.42 for eight."""
    number = max(number, 1.0)
    # Blom's constant: the quantile (P - a) / (P - 2a + 1) of a normal approximates the expected largest of P normals
    blom = 0.375
    return NormalDist().inv_cdf((number - blom) / (number - 2.0 * blom + 1.0))


def barrier(num_r_workers: float, sequences_each: float, spread: float) -> float:
    """Return the expected largest load of ``num_r_workers`` R-workers, relative to the mean load.

    ``sequences_each``: mean sequences, or ranges, of one mini-batch per R-worker. If below
    one, some R-workers have one sequence and others none.

    Sequences of random ages are placed at random (arXiv 2601.21351). A load is a sum of n contexts, so it is nearly
    normal with a spread of s / sqrt(n) of its mean. The largest of P such loads exceeds the mean by that spread times
    the expected largest of P normals. A scheduler that looks ahead does better; a plan does not rely on it.
    """
    if num_r_workers <= 1 or sequences_each <= 0:
        return 1.0
    largest = 1.0 + expected_largest(num_r_workers) * spread / math.sqrt(max(sequences_each, 1.0))
    if sequences_each <= 1:
        return largest / sequences_each
    return max(largest, math.ceil(sequences_each - 1e-9) / sequences_each)  # sequences are indivisible
