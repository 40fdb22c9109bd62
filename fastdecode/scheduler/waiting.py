"""Waiting sequences, oldest first, and how sequences change between the queue and the store."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any, TypeVar

from fastdecode.scheduler.prefix.cache import PrefixCache
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.operations import Begin, Decision, Operation, Preempt, SetFollowersAside
from fastdecode.scheduler.store.store import Store

T = TypeVar("T")


class WaitingQueue:
    """The waiting sequences by age.
    A sequence is set aside while another computes its prefix (it "follows"), or while its prefix is loaded from a disk.
    """

    def __init__(self, prefix_cache: PrefixCache) -> None:
        self._prefix_cache = prefix_cache
        self._waiting: list[TokenSequence] = []
        self._following: dict[int, list[TokenSequence]] = {}
        self._aside: dict[int, TokenSequence] = {}

    def __len__(self) -> int:
        """Return the number of waiting sequences, with those that were set aside."""
        return len(self._waiting) + sum(map(len, self._following.values())) + len(self._aside)

    def __iter__(self) -> Iterator[TokenSequence]:
        """Yield the waiting sequences, oldest first, without those that were set aside."""
        return iter(self._waiting)

    @property
    def all(self) -> list[TokenSequence]:
        """All waiting sequences in no order, with those that were set aside."""
        followers = (follower for group in self._following.values() for follower in group)
        return [*self._waiting, *followers, *self._aside.values()]

    def push(self, sequence: TokenSequence) -> None:
        sequence.num_prefill, sequence.woken_on = sequence.num_tokens, -1
        self._prefix_cache.arrive(sequence)
        self._insert(sequence)

    @property
    def head(self) -> TokenSequence | None:
        """The oldest waiting sequence after those that follow another one; None if no sequence waits."""
        return self._waiting[0] if self._waiting else None

    @property
    def head_follows(self) -> bool:
        """True if another sequence computes a prefix of the oldest waiting sequence."""
        return bool(self._waiting) and self._prefix_cache.leaders.leader_of(self._waiting[0]) is not None

    def set_followers_aside(self) -> None:
        """Set the oldest waiting sequences aside while others compute their prefixes, up to one that need not wait."""
        leader_of = self._prefix_cache.leaders.leader_of
        while self._waiting and (leader := leader_of(self._waiting[0])):
            self._following.setdefault(leader.sequence_id, []).append(self._waiting.pop(0))

    def pop(self) -> TokenSequence:
        return self._waiting.pop(0)

    def release_followers(self, leader: TokenSequence) -> None:
        """Queue the sequences that wait for the prefix of ``leader`` again: it is computed, or never will be."""
        for sequence in self._following.pop(leader.sequence_id, []):
            self._insert(sequence)

    @property
    def num_aside(self) -> int:
        """The number of sequences that wait for their own parked prefix to load."""
        return len(self._aside)

    def set_aside(self, sequence: TokenSequence) -> None:
        """Set ``sequence`` aside until its parked prefix is loaded."""
        self._waiting.remove(sequence)
        self._aside[sequence.sequence_id] = sequence

    def come_back(self, sequence: TokenSequence) -> None:
        """Queue the set-aside ``sequence`` again; do nothing if it has ended or was aborted meanwhile."""
        if self._aside.pop(sequence.sequence_id, None):
            self._insert(sequence)

    def is_aside(self, sequence: TokenSequence) -> bool:
        """Return whether ``sequence`` still waits for its parked prefix to load."""
        return sequence.sequence_id in self._aside

    def discard(self, sequence: TokenSequence) -> None:
        """Remove ``sequence`` from the queue and from those set aside; do nothing if it does not wait."""
        self._aside.pop(sequence.sequence_id, None)
        for group in (self._waiting, *self._following.values()):
            if sequence in group:
                group.remove(sequence)

    def _insert(self, sequence: TokenSequence) -> None:
        bisect.insort(self._waiting, sequence, key=lambda other: other.sequence_id)


class Lifecycle:
    """Carries out policies' decisions, and moves sequences between the queue and the store.
    If a sequence ends or restarts, those that wait for its prefix are queued again. ``num_preemptions``: how many times
    a sequence was preempted.
    """

    def __init__(self, store: Store, queue: WaitingQueue) -> None:
        self.num_preemptions = 0
        self._store, self._queue = store, queue

    def carry_out(self, decision: Decision[T]) -> T:
        """Carry out the operations of ``decision`` one after another, as it asks for them; return its result."""
        answer: Any = None
        while True:
            try:
                operation = decision.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self._do(operation)

    def _do(self, operation: Operation) -> Any:
        match operation:
            case SetFollowersAside():
                return self._queue.set_followers_aside()
            case Begin():
                self._queue.pop()
                return self._store.begin(operation.sequence, operation.segments, operation.hit, operation.second)
            case Preempt():
                return self.preempt(operation.sequence)
            case _:
                return self._store.carry_out(operation)

    def finish_prompt(self, sequence: TokenSequence) -> None:
        """Let ``sequence``, whose prompt is cached, decode; queue the sequences that waited for its prefix."""
        self._store.finish_prompt(sequence)
        self._queue.release_followers(sequence)

    def begin_again(self, sequence: TokenSequence) -> None:
        """Queue ``sequence``, which has lost its cache, by its age."""
        self._queue.release_followers(sequence)
        self._queue.push(sequence)

    def preempt(self, sequence: TokenSequence, keep: bool = True) -> None:
        """Drop the cache of ``sequence`` and queue it; tokens that are not retained as a prefix will be recomputed.
        Without ``keep`` nothing is retained.
        """
        self._store.leave(sequence, keep)
        sequence.was_preempted = True
        self.begin_again(sequence)
        self.num_preemptions += 1

    def end(self, sequence: TokenSequence, keep: bool) -> None:
        """End ``sequence``, which has a cache; retain its full blocks if ``keep``."""
        self._store.residents.forget_unused(sequence)
        self._store.leave(sequence, keep)
        self._queue.release_followers(sequence)

    def discard(self, sequence: TokenSequence) -> None:
        """Remove the waiting ``sequence``, which will never run."""
        self._queue.discard(sequence)
        self._queue.release_followers(sequence)
