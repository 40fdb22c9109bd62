"""The placing of sequences' caches: the length of their segments, and the copies of each segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.core.types import SPLIT_TOKENS

UNLIMITED = 1 << 60
"""Tokens of a segment if every sequence has only one segment."""

Size = tuple[int, int]
"""The size of a segment: its blocks and its tokens."""


@dataclass(frozen=True)
class Placing:
    """Cuts sequences into segments of ``segment_tokens`` tokens, each on its own R-worker.
    The length is a multiple of the block size, or ``UNLIMITED`` if every sequence is one segment. ``copies``: R-workers
    that hold each segment, 1 or 2.
    """

    segment_tokens: int = UNLIMITED
    copies: int = 1

    @property
    def twice(self) -> bool:
        """True if each segment has two copies."""
        return self.copies > 1


WHOLE = Placing()
"""The placing in which every sequence is one segment with one copy."""


@dataclass(frozen=True)
class AskedPlacing:
    """The user's settings for the placing.
    ``kv_shard_tokens``: the length of segments; None to choose it. ``kv_replicas``: copies of each segment. The
    schedule must support both.
    """

    kv_shard_tokens: int | None = None
    kv_replicas: int = 1
    schedule: str = "sls"

    @staticmethod
    def of(settings: Any) -> AskedPlacing:
        """Return the placing that ``settings`` asks for, an object with the attributes of this class.
        If ``settings`` has no ``schedule``, the default schedule is used.
        """
        schedule = getattr(settings, "schedule", AskedPlacing.schedule)
        return AskedPlacing(settings.kv_shard_tokens, settings.kv_replicas, schedule)

    @property
    def uncut(self) -> Placing:
        """The placing asked for, with every sequence in one segment."""
        return Placing(copies=self.kv_replicas)

    @property
    def may_cut(self) -> bool:
        """True if the schedule allows segments of a sequence on several R-workers."""
        return self.schedule not in ("request-level", "hybrid")

    def check(self) -> None:
        """Raise ConfigError unless the segment length is valid and the schedule supports segments.
        Some schedules keep a sequence on one R-worker.
        """
        wanted = self.kv_shard_tokens
        if wanted is None:
            return
        below = SPLIT_TOKENS << max(0, (wanted // SPLIT_TOKENS).bit_length() - 1)
        if wanted not in (below, 2 * below):
            raise ConfigError(
                f"kv_shard_tokens must be {SPLIT_TOKENS} times a power of two, not {wanted}; nearest are {below} and "
                f"{2 * below}"
            )
        if not self.may_cut:
            raise ConfigError(
                f"kv_shard_tokens: schedule {self.schedule} imitates systems that keep the cache of a sequence in one "
                f"piece, and these have no ranges; leave one of them out"
            )

    def check_r_workers(self, count: int) -> None:
        """Raise ConfigError if ``count`` R-workers are too few for two copies."""
        if self.kv_replicas > max(count, 1):
            raise ConfigError(
                f"kv_replicas: two copies need two R-workers, and there is {'one' if count else 'none'}: give more, or "
                f"kv_replicas 1"
            )

    def chosen(
        self, longest: int, num_blocks: Sequence[int], block_size: int, balanced: int | None, chunk_tokens: int = 1
    ) -> Placing:
        """Return the placing asked for, or one chosen for sequences of ``longest`` tokens: see ``choose_range_tokens``.
        Raise ConfigError unless the segment length asked for is a multiple of ``chunk_tokens``.
        """
        wanted = self.kv_shard_tokens
        if wanted and wanted % chunk_tokens:
            raise ConfigError(
                f"kv_shard_tokens must be a multiple of the {chunk_tokens} tokens of the model's attention chunks, not "
                f"{wanted}"
            )
        if wanted is None and self.may_cut:
            wanted = choose_range_tokens(longest, num_blocks, block_size, balanced, chunk_tokens)
        return Placing(wanted or UNLIMITED, self.kv_replicas)

    def fits_pool(
        self, longest: int, num_blocks: Sequence[int], block_size: int, chunk_tokens: int = 1, fixed: int = 0
    ) -> bool:
        """Return whether R-workers with ``num_blocks`` can hold a sequence of ``longest`` tokens in segments.
        If no length was asked for, any multiple of ``chunk_tokens`` may be used. ``fixed``: blocks that each segment
        takes in addition to those of its tokens.
        """
        if not self.may_cut or (self.kv_shard_tokens is None and len(num_blocks) == 1):
            return False
        range_tokens = self.kv_shard_tokens or least_range_tokens(chunk_tokens)
        return range_tokens is not None and fits_pool(longest, range_tokens, num_blocks, block_size, fixed)


def choose_range_tokens(
    longest: int,
    num_blocks: Sequence[int],
    block_size: int,
    balanced_kv_tokens: int | None,
    chunk_tokens: int = 1,
) -> int | None:
    """Return the number of tokens per segment to choose; None if sequences need not, or cannot, be cut.
    They need not be cut if every R-worker can hold ``longest`` tokens, and attends to them while the S-worker computes.
    They cannot be cut if even the smallest segments do not fit the R-workers. ``balanced_kv_tokens``: KV tokens that an
    R-worker attends while the S-worker computes, if known. A segment is a multiple of ``chunk_tokens``.
    """
    least = least_range_tokens(chunk_tokens)
    if len(num_blocks) == 1 or least is None:
        return None
    fits_one = -(-longest // block_size) <= min(num_blocks)
    range_tokens = max(4096, least)  # the fewest tokens of a range whose length FastDecode chooses
    while range_tokens < (longest if balanced_kv_tokens is None else balanced_kv_tokens):
        range_tokens *= 2
    if fits_one:
        return range_tokens if range_tokens < longest and balanced_kv_tokens is not None else None
    while range_tokens > least and not fits_pool(longest, range_tokens, num_blocks, block_size):
        range_tokens //= 2
    return range_tokens if fits_pool(longest, range_tokens, num_blocks, block_size) else None


def least_range_tokens(chunk_tokens: int) -> int | None:
    """Return the tokens of the shortest segment that is a multiple of ``chunk_tokens``; None if there is none.
    Segment lengths are powers of two.
    """
    return max(SPLIT_TOKENS, chunk_tokens) if chunk_tokens & (chunk_tokens - 1) == 0 else None


def fits_pool(longest: int, range_tokens: int, num_blocks: Sequence[int], block_size: int, fixed: int = 0) -> bool:
    """Return whether R-workers with ``num_blocks`` hold ``longest`` tokens in segments of ``range_tokens`` tokens."""
    blocks = np.array(num_blocks)
    return pool_holds(
        sizes_of(longest, range_tokens, block_size, fixed), np.column_stack([blocks, blocks * block_size])
    )


def pool_holds(sizes: Sequence[Size], capacities: np.ndarray) -> bool:
    """Return whether segments of ``sizes`` fit R-workers of ``capacities``, int64 [num_workers, 2]: blocks, tokens.
    All sizes but one are equal.
    """
    other = max(sizes) if max(sizes) > sizes[0] else sizes[-1]
    return bool((slots_beside(np.array(other), np.array(sizes[0]), capacities) >= len(sizes) - 1).any())


def slots_beside(other: np.ndarray, whole: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return how many segments of size ``whole`` fit the pool beside one of size ``other`` on R-worker i, for each i.
    The result is [num_workers], -1 where ``other`` does not fit. The order in which segments are placed does not
    change the result. ``left``: free room, [num_workers, entries of a size].
    """
    slots, fits = (np.maximum(left, 0) // whole).min(axis=1), (left >= other).all(axis=1)
    beside = slots.sum() - slots + (np.maximum(left - other, 0) // whole).min(axis=1)
    return np.where(fits, beside, -1)


def sizes_of(num_tokens: int, segment_tokens: int, block_size: int, fixed: int = 0) -> list[Size]:
    """Return the blocks and tokens of each segment of a sequence of ``num_tokens`` tokens.
    ``fixed``: blocks of each segment in addition to those of its tokens.
    """
    tokens = [min(segment_tokens, num_tokens - start) for start in starts(num_tokens, segment_tokens)]
    return [(fixed - (-each // block_size), each) for each in tokens]


def starts(num_tokens: int, segment_tokens: int) -> range:
    """Return the position of the first token of each segment of a sequence of ``num_tokens``; at least one segment."""
    return range(0, max(num_tokens, 1), segment_tokens)
