"""Prompts that prefill workers compute, and how far these jobs are."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

from fastdecode.core.protocols import PrefillPolicy
from fastdecode.core.remote_prefill import PrefillPart, RemotePrefill, StoredAt
from fastdecode.core.step import ScheduledStep
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store


class RemotePrompts:
    """The sequences whose prompts prefill workers compute. They count as running and have blocks, but no rows in steps.
    ``policy`` chooses these sequences; None if there are no prefill workers.
    """

    def __init__(self, store: Store, policy: PrefillPolicy | None) -> None:
        self.policy = policy
        self._store, self._residents = store, store.residents
        self._job_ids = itertools.count(1)
        self._under_way: dict[int, TokenSequence] = {}
        self._places: dict[int, tuple[StoredAt, ...]] = {}
        self._started: list[RemotePrefill] = []
        self._arrived: list[tuple[int, TokenSequence]] = []
        self._now_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of prompts that prefill workers are computing."""
        return len(self._under_way)

    def __contains__(self, job_id: int) -> bool:
        """Return whether a sequence still waits for job ``job_id``; not if it was aborted, preempted or lost."""
        sequence = self._under_way.get(job_id)
        return sequence is not None and sequence.job_id == job_id

    def end_if_left(self, job_id: int) -> bool:
        """End job ``job_id`` if no sequence waits for it any more; return False if one still waits."""
        has_left = job_id not in self
        if has_left and job_id in self._under_way:
            self._end(job_id, self._now_seconds)
        return has_left

    def begin_step(self, now_seconds: float, num_waiting: int = 0) -> None:
        """Set the time for the next decisions, in seconds, and the number of sequences that wait to start."""
        self._now_seconds = now_seconds
        if self.policy:
            self.policy.begin_step(now_seconds, num_waiting, len(self._residents.decoding))

    def takes(self, num_tokens: int, context_len: int) -> bool:
        """Return whether prefill workers would compute ``num_tokens`` tokens after ``context_len`` cached ones."""
        return self.policy is not None and bool(self._parts(self.policy, num_tokens, context_len))

    def _parts(self, policy: PrefillPolicy, num_tokens: int, context_len: int) -> tuple[PrefillPart, ...]:
        """Return which prefill worker computes which tokens of a prompt.
        The result is empty after a prefix with a recurrent state, which prefill workers cannot read.
        """
        return () if context_len and not self._store.workers.sizes.rewinds else policy.assign(num_tokens, context_len)

    def start(self, sequence: TokenSequence) -> bool:
        """Let prefill workers compute the prompt of ``sequence``, which has just started.
        Return False if the S-worker must compute it. After a cached prefix, prefill workers compute only the remaining
        tokens. They read the prefix from the R-workers that hold it. The results go to each copy of each segment.
        """
        if self.policy is None or sequence.scored:
            return False
        parts = self._parts(self.policy, sequence.num_prefill - sequence.num_cached, sequence.num_cached)
        if not parts:
            return False
        job_id, context_len = next(self._job_ids), parts[0].start
        places = self._places_of(sequence, job_id, context_len)
        self._store.send_away(sequence, job_id, places)
        self.policy.started(job_id, parts)
        self._under_way[job_id], self._places[job_id] = sequence, places
        tokens = tuple(sequence.tokens(0, sequence.num_prefill))
        stores = tuple(each for each in places if each.end > context_len)
        homes = {each.start: each for each in reversed(places) if each.start < context_len}
        prefix = tuple(replace(homes[start], end=min(homes[start].end, context_len)) for start in sorted(homes))
        self._started.append(RemotePrefill(job_id, sequence.sequence_id, stores, tokens, parts, prefix))
        return True

    def _places_of(self, sequence: TokenSequence, job_id: int, context_len: int) -> tuple[StoredAt, ...]:
        """Return the R-workers that store the prompt of ``sequence`` or hold its first ``context_len`` tokens.
        For a segment with two copies, the first copy's R-worker comes first. The first ticket of all is ``job_id``.
        """
        tickets = itertools.chain([job_id], self._job_ids)
        places = []
        for segment in sequence.segments:
            end = min(segment.start + self._store.table.segment_tokens, sequence.num_prefill)
            workers = segment.workers if end > context_len else segment.workers[:1]
            for worker in workers if segment.start < end else ():
                places.append(StoredAt(worker, segment.cache_id, segment.start, end, next(tickets)))
        return tuple(places)

    def drop_missed(self, job_id: int, missed: Collection[int]) -> bool:
        """Drop those copies of the job's sequence whose tickets are in ``missed``.
        Return False if a segment has no other copy.
        """
        sequence = self._under_way.get(job_id)
        if sequence is None or sequence.job_id != job_id:
            return True
        lacking = {(each.r_worker, each.cache_id) for each in self._places[job_id] if each.ticket in missed}
        held = [(segment, worker) for segment in sequence.segments for worker in segment.workers]
        for segment, worker in [each for each in held if (each[1], each[0].cache_id) in lacking]:
            if not segment.twice:
                return False
            self._store.give_up(sequence, segment, worker)
        return True

    def computed(self, job_id: int, now_seconds: float) -> bool:
        """Handle a prompt that prefill workers have computed: see :meth:`Scheduler.prefilled`."""
        places = self._places.get(job_id, ())
        sequence = self._end(job_id, now_seconds, computed=True)
        if sequence is None:
            return False
        held = {(worker, each.cache_id) for each in sequence.segments for worker in each.workers}
        self._store.arrive([each for each in places if (each.r_worker, each.cache_id) in held])
        self._arrived.append((job_id, sequence))
        return True

    def failed(self, job_id: int, now_seconds: float) -> TokenSequence | None:
        """Forget the failed job ``job_id``; return its sequence, or None if that no longer waits for the job."""
        return self._end(job_id, now_seconds)

    def take(self) -> tuple[tuple[RemotePrefill, ...], tuple[int, ...]]:
        """Return prompts to send to prefill workers, and ids of sequences whose prompts arrived since the last step."""
        started = tuple(each for each in self._started if not self.end_if_left(each.job_id))
        arrived = tuple(each.sequence_id for job_id, each in self._arrived if each.job_id == job_id)
        self._started.clear()
        self._arrived.clear()
        return started, arrived

    def put_back(self, step: ScheduledStep) -> None:
        """Queue the prompts of ``step`` again, since the R-workers refused the step."""
        self._started[:0] = step.prefills
        self.arrive_again(step)

    def arrive_again(self, step: ScheduledStep) -> None:
        """Let the prompts that arrived with ``step`` arrive with the next step, since their tokens were not sampled."""
        sequences = [self._residents.prompts[each] for each in step.arrived]
        self._arrived[:0] = [(sequence.job_id, sequence) for sequence in sequences]

    def _end(self, job_id: int, now_seconds: float, computed: bool = False) -> TokenSequence | None:
        """Forget job ``job_id``; return its sequence if that still waits for the job, else None."""
        sequence = self._under_way.pop(job_id, None)
        self._places.pop(job_id, None)
        if sequence is not None and self.policy:
            self.policy.ended(job_id, now_seconds, computed)
        return sequence if sequence is not None and sequence.job_id == job_id else None
