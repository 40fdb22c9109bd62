"""The placing of cached sequences: the length of their segments, and how many R-workers hold each segment."""

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
    """Cuts sequences into segments of ``segment_tokens`` tokens, which different R-workers hold.
    The length is a multiple of the block size, or ``UNLIMITED`` if every sequence is one segment. ``copies``: how many
    R-workers hold each segment, 1 or 2.
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
    """The settings from which a ``Placing`` is chosen.
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
        """The placing that settings ask for, but with every sequence in one segment."""
        return Placing(copies=self.kv_replicas)

    @property
    def may_cut(self) -> bool:
        """True if the schedule allows segments of one sequence on several R-workers."""
        return self.schedule not in ("request-level", "hybrid")

    def check(self) -> None:
        """Raise ConfigError if the segment length is invalid, or if the schedule allows no segments."""
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
        """Return the placing that settings ask for, with a length from ``choose_range_tokens`` if they give none.
        Raise ConfigError unless a given length is a multiple of ``chunk_tokens``.
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
        Unless settings give the segment length, the shortest one is tried. ``fixed``: blocks that each segment takes
        in addition to those of its tokens.
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
    """Return a good segment length in tokens; None if sequences need not be cut, or cannot be.
    They need not be cut if every R-worker can hold ``longest`` tokens, and attends to them while the S-worker computes.
    They cannot be cut if even the smallest segments do not fit the R-workers. ``balanced_kv_tokens``: KV tokens that an
    R-worker attends while the S-worker computes, if known. A segment is a multiple of ``chunk_tokens``.
    """
    least = least_range_tokens(chunk_tokens)
    if len(num_blocks) == 1 or least is None:
        return None
    fits_one = -(-longest // block_size) <= min(num_blocks)
    range_tokens = max(4096, least)  # shortest segment to choose, unless only shorter ones fit
    while range_tokens < (longest if balanced_kv_tokens is None else balanced_kv_tokens):
        range_tokens *= 2
    if fits_one:
        return range_tokens if range_tokens < longest and balanced_kv_tokens is not None else None
    while range_tokens > least and not fits_pool(longest, range_tokens, num_blocks, block_size):
        range_tokens //= 2
    return range_tokens if fits_pool(longest, range_tokens, num_blocks, block_size) else None


def least_range_tokens(chunk_tokens: int) -> int | None:
    """Return the shortest possible segment, in tokens; None unless ``chunk_tokens`` is a power of two."""
    return max(SPLIT_TOKENS, chunk_tokens) if chunk_tokens & (chunk_tokens - 1) == 0 else None


def fits_pool(longest: int, range_tokens: int, num_blocks: Sequence[int], block_size: int, fixed: int = 0) -> bool:
    """Return whether R-workers with ``num_blocks`` blocks hold ``longest`` tokens in segments of ``range_tokens``."""
    blocks = np.array(num_blocks)
    return pool_holds(
        sizes_of(longest, range_tokens, block_size, fixed), np.column_stack([blocks, blocks * block_size])
    )


def pool_holds(sizes: Sequence[Size], capacities: np.ndarray) -> bool:
    """Return whether segments of ``sizes`` fit R-workers of ``capacities``, int64 [num_workers, 2]: blocks, tokens.
    All but one segment must have the same size.
    """
    other = max(sizes) if max(sizes) > sizes[0] else sizes[-1]
    return bool((slots_beside(np.array(other), np.array(sizes[0]), capacities) >= len(sizes) - 1).any())


def slots_beside(other: np.ndarray, whole: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return, for each R-worker i, how many segments of size ``whole`` fit all R-workers if i also holds ``other``.
    ``other``: the size of another segment. ``left``: free room of each R-worker, with the columns of a size. The result
    is [num_workers]; -1 if ``other`` does not fit on i.
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
    """Return the first positions of the segments of a sequence with ``num_tokens`` tokens; at least one segment."""
    return range(0, max(num_tokens, 1), segment_tokens)
