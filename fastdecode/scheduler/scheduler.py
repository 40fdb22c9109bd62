"""Admission, chunking and placement: the one authority over what runs in the next step. Pure: no clock, no sockets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fastdecode.scheduler.mini_batches import deal
from fastdecode.scheduler.placement import Placement
from fastdecode.scheduler.sequence import Sequence
from fastdecode.types import Chunk, ScheduledStep, Verb


@dataclass(frozen=True)
class Limits:
    """``max_num_batched_tokens`` is the token budget of a whole step; ``scratch_tokens`` the prompt tokens whose keys
    and values the S-worker can hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_mini_batches: int
    scratch_tokens: int


class Scheduler:
    """First come, first served with stall-free chunks: decodes, then the prompt begun, then new requests.

    A sequence is admitted only when the blocks of its prompt and longest output fit, so none is ever preempted.
    """

    def __init__(self, limits: Limits, placement: Placement) -> None:
        self.limits = limits
        self.placement = placement
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self._unborn = 0
        self._scratch_free = limits.scratch_tokens
        self._controls: list[list[tuple[int, int, int, int]]] = [[] for _ in placement.num_blocks]

    @property
    def has_unfinished(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def has_controls(self) -> bool:
        """True while some R-worker has yet to be told of a fork or a release."""
        return any(self._controls)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence (and the siblings it brings) behind those already waiting."""
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledStep:
        """The next step. Controls are handed over once: the caller applies them even if the step fails later."""
        chunks = [self._decode(sequence) for sequence in self.running.values() if not sequence.in_prompt]
        budget = self.limits.max_num_batched_tokens - len(chunks)
        for sequence in self.running.values():
            if sequence.in_prompt and budget > 0:
                chunks.append(self._prompt_chunk(sequence, budget))
                budget -= len(chunks[-1].token_ids)
        while budget > 0 and self._admit_next():
            chunks.append(self._prompt_chunk(next(reversed(self.running.values())), budget))
            budget -= len(chunks[-1].token_ids)
        controls = tuple(tuple(verbs) for verbs in self._controls)
        self._controls = [[] for _ in controls]
        return ScheduledStep(deal(chunks, self.limits.num_mini_batches), controls)

    def take_back(self, step: ScheduledStep) -> None:
        """The R-workers refused ``step``: its controls go before any that came since."""
        self._controls = [[*mine, *later] for mine, later in zip(step.controls, self._controls, strict=True)]

    def commit(self, step: ScheduledStep) -> None:
        """The step's rows are in the caches now."""
        for chunks in step.mini_batches:
            for chunk in chunks:
                sequence = self.running[chunk.sequence_id]
                sequence.num_cached += len(chunk.token_ids)
                if not sequence.in_prompt:
                    self._leave_scratch(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """``parent``'s prompt is cached: its siblings start from a shared copy and decode from here on."""
        for sibling in parent.siblings:
            fork = (int(Verb.FORK), sibling.sequence_id, parent.sequence_id, len(parent.prompt_token_ids))
            self._controls[parent.worker].append(fork)
            sibling.num_cached = len(parent.prompt_token_ids)
            self.running[sibling.sequence_id] = sibling
        self._unborn -= len(parent.siblings)
        parent.siblings = ()

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, finished or aborted; its blocks are released with the next step.

        Siblings that are not forked yet go with the sequence that brings them.
        """
        if sequence.sequence_id not in self.running:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        del self.running[sequence.sequence_id]
        self._leave_scratch(sequence)
        for member in (sequence, *sequence.siblings):
            self.placement.release(member)
        self._unborn -= len(sequence.siblings)
        if sequence.num_cached:
            self._controls[sequence.worker].append((int(Verb.RELEASE), sequence.sequence_id, 0, 0))

    def _admit_next(self) -> bool:
        if not self.waiting:
            return False
        sequence = self.waiting[0]
        taken = len(self.running) + self._unborn
        if taken + 1 + len(sequence.siblings) > self.limits.max_num_seqs or not self.placement.reserve(sequence):
            return False
        self.waiting.popleft()
        self.running[sequence.sequence_id] = sequence
        self._unborn += len(sequence.siblings)
        sequence.uses_scratch = len(sequence.prompt_token_ids) <= self._scratch_free
        if sequence.uses_scratch:
            self._scratch_free -= len(sequence.prompt_token_ids)
        return True

    def _decode(self, sequence: Sequence) -> Chunk:
        token = sequence.output_token_ids[-1]
        return Chunk(sequence.sequence_id, sequence.worker, sequence.num_cached, (token,))

    def _prompt_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        count = min(len(sequence.prompt_token_ids) - sequence.num_cached, budget)
        last = sequence.num_cached + count == len(sequence.prompt_token_ids)
        return Chunk(
            sequence.sequence_id,
            sequence.worker,
            sequence.num_cached,
            sequence.tokens(sequence.num_cached, count),
            attends=not sequence.uses_scratch,
            samples=last,
            last_of_prompt=last,
            is_decode=False,
        )

    def _leave_scratch(self, sequence: Sequence) -> None:
        if sequence.uses_scratch:
            sequence.uses_scratch = False
            self._scratch_free += len(sequence.prompt_token_ids)
