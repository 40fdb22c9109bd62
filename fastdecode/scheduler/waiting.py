"""Sequences that wait, oldest first."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.prefix import PrefixCache


class WaitingQueue:
    """Ordered by age. One whose prefix is being computed right now steps aside and follows its leader."""

    def __init__(self, prefix_cache: PrefixCache) -> None:
        self._prefix_cache = prefix_cache
        self._waiting: list[Sequence] = []
        self._following: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Return how many wait, followers included."""
        return len(self._waiting) + sum(map(len, self._following.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Oldest first, without followers."""
        return iter(self._waiting)

    @property
    def all(self) -> list[Sequence]:
        """All that wait, followers included, in no order."""
        return [*self._waiting, *(follower for group in self._following.values() for follower in group)]

    def push(self, sequence: Sequence) -> None:
        """Queue ``sequence`` to compute all tokens it has."""
        sequence.num_prefill = sequence.num_tokens
        self._prefix_cache.arrive(sequence)
        self._insert(sequence)

    def head(self) -> Sequence | None:
        """The oldest that need not wait for another's prefix."""
        while self._waiting:
            leader = self._prefix_cache.leader(self._waiting[0])
            if leader is None:
                return self._waiting[0]
            self._following.setdefault(leader.sequence_id, []).append(self._waiting.pop(0))
        return None

    def pop(self) -> Sequence:
        """Take the head out."""
        return self._waiting.pop(0)

    def release_followers(self, leader: Sequence) -> None:
        """``leader`` has computed its prompt, or will not."""
        for sequence in self._following.pop(leader.sequence_id, []):
            self._insert(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, wherever it waits, if it does."""
        for group in (self._waiting, *self._following.values()):
            if sequence in group:
                group.remove(sequence)

    def _insert(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=lambda other: other.sequence_id)
