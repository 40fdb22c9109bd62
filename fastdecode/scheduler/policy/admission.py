"""Admission: decides which waiting sequence starts next and where, within several budgets.
The budgets are running sequences (``max_num_seqs``), blocks, KV load and tokens per step. Prompts are cut to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from fastdecode.core.step import Chunk
from fastdecode.scheduler.places.place import UNNAMED, Segment
from fastdecode.scheduler.policy.future import Future
from fastdecode.scheduler.policy.load_control import LoadControl
from fastdecode.scheduler.policy.load_forecast import Newcomer
from fastdecode.scheduler.policy.load_limit import LoadLimit
from fastdecode.scheduler.policy.needs import Needs
from fastdecode.scheduler.policy.placement import HomePlacement, SecondPlacement, SegmentPlacement
from fastdecode.scheduler.policy.room import Room
from fastdecode.scheduler.prefix.source import Hit
from fastdecode.scheduler.schedules import Limits, Prefill, Schedule
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.operations import Begin, Close, Decision, SetFollowersAside
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.waiting import WaitingQueue

WouldBegin = Callable[[int, int], int | bool]
"""Given the numbers of uncomputed prompt tokens and of cached ones: would this step or prefill workers compute any?"""


class _Start(NamedTuple):
    """How a sequence starts: the load that it adds, its segments, and the cached prefix that it uses."""

    newcomer: Newcomer
    segments: list[Segment]
    hit: Hit | None


class Admission:
    """Starts the first sequence in the queue if every budget allows it. No sequence overtakes the first.
    ``num_starts``: sequences that started for the first time in this step.
    """

    def __init__(self, schedule: Schedule, limits: Limits, store: Store, queue: WaitingQueue) -> None:
        self.load_limit = LoadLimit(
            limits.kv_load_limit, store.workers, schedule.stabilizes_load, limits.balanced_kv_tokens
        )
        self.load_control = LoadControl(self.load_limit, limits.micro_batch_interval)
        self.future = Future(limits, store, queue)
        self.needs = Needs(schedule, limits)
        self.room = Room(self.needs, limits, store, self.load_limit)
        self.homes = HomePlacement(limits, store, self.room, self.future, self.load_limit)
        self.second_places = SecondPlacement(limits, store, self.needs, self.room, self.future)
        self.segments = SegmentPlacement(limits, store, self.needs, self.room, self.future, self.load_limit)
        self.num_starts = 0
        self._schedule, self._limits, self._store, self._queue = schedule, limits, store, queue
        self._residents = store.residents
        self._is_open = True

    def begin_step(self) -> None:
        """Reset the counts for a new step. Call this once the sequences that run in it are known."""
        self.future.begin_step()
        self.num_starts = 0
        self._is_open = not self._schedule.waves or not len(self._residents)
        if not len(self._queue):
            return
        self.homes.begin_step()
        self.future.learn_lengths()
        self._begin_load_control()

    def start_next(self, would_begin: WouldBegin) -> Decision[TokenSequence | None]:
        """Start the first sequence in the queue and return it; None if it must wait."""
        if self._queue.head_follows:
            yield SetFollowersAside()
        sequence = self._queue.head
        if sequence is None or not self._is_open or not self._has_seats(sequence):
            return None
        alone = self.future.newcomer(sequence)
        if not self.load_control.affords(alone):
            return None
        if self._store.adopted.is_broken(sequence):
            yield Close(sequence)
        hits = self._store.prefixes.hits(sequence)
        if not hits and not would_begin(alone.num_left, 0):
            return None
        if sequence.num_tokens > self.needs.segment_tokens:
            start = self._in_segments(sequence, hits, would_begin)
        else:
            start = self._whole(sequence, alone, hits, would_begin)
        if start is None:
            return None
        self.num_starts += sequence.outputs_at_start is None
        yield Begin(sequence, start.segments, start.hit, start.newcomer.copy)
        self._note(start)
        return sequence

    def _whole(
        self, sequence: TokenSequence, alone: Newcomer, hits: dict[int, Hit], would_begin: WouldBegin
    ) -> _Start | None:
        """Return how ``sequence`` starts in one segment; None if budgets forbid it.
        ``alone``: the KV load that ``sequence`` and its siblings add. ``hits``: by R-worker, the cached prefix to start
        from.
        """
        costs = self.homes.costs(sequence, alone, hits)
        for index in self.homes.best_first(sequence, alone, hits, costs):
            for hit in self._store.prefixes.ways(hits.get(index)):
                if start := self._on(index, hit, sequence, costs, would_begin):
                    return start
        return None

    def _on(
        self, index: int, hit: Hit | None, sequence: TokenSequence, costs: np.ndarray, would_begin: WouldBegin
    ) -> _Start | None:
        """Return how ``sequence`` starts in one segment on R-worker ``index``, from the cached prefix ``hit``.
        Return None if budgets forbid it.
        """
        if not self.room.to_begin(sequence, index, hit):
            return None
        if (second := self.second_places.beside(sequence, index, hit, costs)) is None:
            return None
        there = replace(self.future.newcomer(sequence, index, hit.num_tokens if hit else -1), copy=second)
        begins = would_begin(there.num_left, there.num_prefill - there.num_left)
        if not begins or not self.load_limit.fits(there, self.future.forecast):
            return None
        return _Start(there, [Segment(UNNAMED, 0, self.needs.at_start(sequence), [index])], hit)

    def _in_segments(self, sequence: TokenSequence, hits: dict[int, Hit], would_begin: WouldBegin) -> _Start | None:
        """Return how ``sequence`` starts in several segments; None if budgets forbid it.
        It starts from the longest cached prefix in ``hits``, or from none.
        """
        longest = max(hits.values(), key=lambda hit: hit.num_blocks, default=None)
        for hit in dict.fromkeys((longest, None)):
            if found := self.segments.to_begin(sequence, hit, would_begin):
                return _Start(*found, hit)
        return None

    def _note(self, start: _Start) -> None:
        newcomer = start.newcomer
        for worker in (*(worker for each in start.segments for worker in each.workers), *newcomer.holders):
            self.homes.available[worker] = self._store.workers[worker].available
        self.future.forecast().add(newcomer)
        self.load_control.started(newcomer)

    def _begin_load_control(self) -> None:
        """Let load control decide whether the waiting sequences' starts are spread over several steps."""
        seats = max(1, self._limits.max_num_seqs - len(self._residents))
        head = next(iter(self._queue), None)
        knows_lengths = head is not None and (not head.may_stop or self.future.output_lengths.is_known)
        self.load_control.begin_step(
            lambda: [self.future.newcomer(sequence) for sequence in islice(self._queue, seats)],
            None if head is None else self.future.newcomer(head),
            len(self._queue) <= seats,
            not len(self._residents),
            self.future.forecast,
            (lambda: self.future.outlook(self.load_limit.tokens or 0)) if knows_lengths else None,
        )

    def _has_seats(self, sequence: TokenSequence) -> bool:
        return len(self._residents) + 1 + len(sequence.siblings) <= self._limits.max_num_seqs


MOST_SCORED_ROWS = 256
"""Most rows per step with logits for scoring, beyond the sampling rows. Each takes memory for the whole vocabulary."""


class ChunkCutter:
    """Cuts prompts into chunks that fit a step: in total ``budget`` rows, of which MOST_SCORED_ROWS may be scored."""

    def __init__(self, store: Store, prefill: Prefill, budget: int) -> None:
        self.chunks: list[Chunk] = []
        self._store, self._prefill, self._budget = store, prefill, budget
        self._scored_left = MOST_SCORED_ROWS

    def rows_for(self, num_left: int) -> int:
        """Return how many of a prompt's ``num_left`` uncomputed tokens this step can compute."""
        if self._prefill is Prefill.UNBOUNDED:
            return num_left
        if self._prefill is not Prefill.CHUNKED and num_left > self._budget and self.chunks:
            return 0
        return max(0, min(num_left, self._budget))

    def cut(self, sequence: TokenSequence) -> None:
        """Add a chunk of ``sequence`` to the step, with as many of the next prompt tokens as fit."""
        count = self.rows_for(sequence.num_prefill - sequence.num_cached)
        if sequence.scored:
            count = min(count, self._scored_left)
            self._scored_left -= count
        if count:
            chunk = self._store.residents.next_rows(sequence, self._store.prefixes.kept.rows_to_stop(sequence, count))
            self.chunks.append(chunk)
            self._budget -= len(chunk.token_ids)
