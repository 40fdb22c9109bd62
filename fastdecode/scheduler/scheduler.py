"""The scheduler, which alone decides what runs in the next step: decodes, prompt chunks, starts, preemption.
It does no input or output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from fastdecode.core.protocols import DraftPolicy, PrefillPolicy
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep, deal
from fastdecode.scheduler.drafts import DraftCounts, Drafts
from fastdecode.scheduler.members import Members
from fastdecode.scheduler.places.speeds import Observed, Observer
from fastdecode.scheduler.policy.admission import Admission, ChunkCutter
from fastdecode.scheduler.policy.decodes import Decodes
from fastdecode.scheduler.remote_prompts import RemotePrompts
from fastdecode.scheduler.schedules import Limits, Prefill, Schedule
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.snapshot import Snapshot, take_snapshot
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.transfers import Transfers
from fastdecode.scheduler.waiting import Lifecycle, WaitingQueue


@dataclass(frozen=True)
class SchedulerStatistics:
    """Counters of the prefix cache, of preemptions and of drafts.
    ``prefix_queries``: requests that looked for a cached prefix. ``prefix_hit_tokens``: prompt tokens found in one.
    ``woken_tokens``: tokens loaded from disks. ``failed_wakes``: parked prefixes that failed to load.
    """

    prefix_queries: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    woken_tokens: int = 0
    failed_wakes: int = 0

    def since(self, before: SchedulerStatistics) -> SchedulerStatistics:
        """Return these counts minus the earlier counts ``before``."""
        return SchedulerStatistics(
            self.prefix_queries - before.prefix_queries,
            self.prefix_hit_tokens - before.prefix_hit_tokens,
            self.preemptions - before.preemptions,
            self.drafts.since(before.drafts),
            self.woken_tokens - before.woken_tokens,
            self.failed_wakes - before.failed_wakes,
        )


class Scheduler:
    """Schedules by one rule with three budgets: tokens per step, KV tokens attended per step and R-worker, KV blocks.
    The oldest sequences come first. A sequence starts only after all older ones, except for those that wait until
    another sequence has computed their prefix. When blocks run out, the youngest are preempted and recomputed later. So
    the oldest always continues, and every sequence ends. Its public parts: ``store`` knows which R-workers hold which
    tokens, and their pending controls. ``members`` adds and removes R-workers. ``transfers`` says what to copy between
    two steps. ``drafts`` says for which sequences to draft. ``load_limit`` is the limit of KV tokens per step.
    """

    def __init__(
        self,
        schedule: Schedule,
        limits: Limits,
        prefill_policy: PrefillPolicy | None = None,
        draft_policy: DraftPolicy | None = None,
    ) -> None:
        """``prefill_policy``: None without prefill workers. ``draft_policy``: None without draft tokens."""
        self.limits = limits
        self.store = Store(limits, retains=not schedule.reserves_longest)
        self.queue = WaitingQueue(self.store.prefixes)
        self.lifecycle = Lifecycle(self.store, self.queue)
        self.admission = Admission(schedule, limits, self.store, self.queue)
        self.load_limit = self.admission.load_limit
        self.remote_prompts = RemotePrompts(self.store, prefill_policy)
        self.drafts = Drafts(self.store, limits, draft_policy)
        self.transfers = Transfers(self.store, self.admission, limits, self.lifecycle)
        self.members = Members(self.store, self.queue, self.admission, self.transfers, self.lifecycle)
        self._decodes = Decodes(self.store, self.admission, limits, self.transfers.copies)
        self._prefills = self.remote_prompts if prefill_policy else None
        self._drafts = self.drafts if limits.num_speculative_tokens else None
        self._observers: list[Observer] = [self.store.workers, self.load_limit, *self.transfers.observers]
        self._observers += [self._drafts] if self._drafts else []
        self._schedule = schedule
        self._table, self._residents = self.store.table, self.store.residents
        self._rows = np.zeros(0, np.int64)

    def with_limits(self, limits: Limits) -> Scheduler:
        """Return a new scheduler with the same schedule and other limits."""
        return Scheduler(self._schedule, limits, self.remote_prompts.policy, self.drafts.policy)

    @property
    def has_unfinished(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(len(self.queue) or len(self._residents))

    def snapshot(self, with_sequences: bool = True) -> Snapshot:
        """Return the scheduler's state as a value.
        ``with_sequences``: list all sequences too, which takes milliseconds for thousands.
        """
        return take_snapshot(self.store, self.queue, with_sequences)

    @property
    def statistics(self) -> SchedulerStatistics:
        """Counts of the prefix cache, preemptions and drafts since the scheduler was made."""
        cache, woken = self.store.prefixes, self.store.parked.counts
        return SchedulerStatistics(
            cache.num_queries,
            cache.num_hit_tokens,
            self.lifecycle.num_preemptions,
            self.drafts.counts.copy(),
            woken.num_tokens,
            woken.num_failed,
        )

    def observe(self, step: ScheduledStep, s_seconds: float, wait_seconds: float, r_seconds: Sequence[float]) -> None:
        """Learn R-workers' speeds, prices of moves and an unknown load limit from the duration of ``step``.
        ``wait_seconds``: how long the S-worker waited for R-workers. ``r_seconds``: busy seconds of each R-worker.
        """
        observed = Observed(step, s_seconds, wait_seconds, r_seconds)
        for observer in self._observers:
            observer.observe(observed)

    def add(self, sequence: TokenSequence) -> None:
        """Queue ``sequence`` and its siblings by age. Raise RequestError if it could never run."""
        self.admission.room.check(sequence)
        self.queue.push(sequence)

    def schedule(self, now_seconds: float = 0.0) -> ScheduledStep:
        """Return the next step.
        Its controls are returned only once, so the caller must apply them even if the step fails later.
        ``now_seconds``: the time on any clock, for the policy of prefill workers.
        """
        carry_out = self.lifecycle.carry_out
        if self._prefills is not None:
            self._prefills.begin_step(now_seconds, len(self.queue))
        if self._schedule.prefill is Prefill.FIRST:
            self._table.refresh()
            chunks, num_starts = self._prompt_chunks(0)
            self._rows = np.zeros(0, np.int64) if chunks else carry_out(self._decodes.choose())
        else:
            self._rows = carry_out(self._decodes.choose())
            chunks, num_starts = self._prompt_chunks(len(self._rows))
        drafts = self._drafts.place(self._rows, chunks, self.load_limit.strict) if self._drafts else {}
        mini_batches = deal(self._table.mini_batch(self._rows), chunks, self.limits.num_mini_batches)
        prefills, arrived = self._prefills.take() if self._prefills is not None else ((), ())
        controls, handed_over = self.store.workers.take_controls(), self.store.tails.handovers(mini_batches)
        return ScheduledStep(mini_batches, controls, num_starts, prefills, arrived, drafts, handovers=handed_over)

    def controls_alone(self) -> ScheduledStep:
        """Return a step without rows, with the pending controls for the R-workers."""
        self.store.note_rows(())
        return ScheduledStep((MiniBatch.of([]),), self.store.workers.take_controls())

    def take_back(self, step: ScheduledStep) -> None:
        """Queue the controls of ``step`` again, before newer controls, since the R-workers refused the step."""
        self.store.workers.put_back(step.controls)
        self.remote_prompts.put_back(step)

    def abandon(self, step: ScheduledStep) -> None:
        """Handle a step that R-workers received, but whose rows were not all computed.

        Prompts that arrived with ``step`` arrive with the next step. Recurrent states may have advanced, so their
        sequences are recomputed.
        """
        self.remote_prompts.arrive_again(step)
        if self.limits.sizes.rewinds:
            return
        computed = {each for mini_batch in step.mini_batches for each in mini_batch.chunks["sequence_id"].tolist()}
        for sequence in self._residents.all:
            if sequence.sequence_id in computed:
                self.lifecycle.preempt(sequence, keep=False)

    def commit(self, step: ScheduledStep, accepted: Mapping[int, int] = MappingProxyType({})) -> None:
        """Count the rows of ``step``, the last scheduled step, as cached.
        ``accepted``: how many draft tokens of each sequence become output tokens; 0 for sequences that are not listed.
        """
        self.store.note_rows(step.mini_batches, step.arrived)
        self.store.tails.advance(self._rows)
        self._rows = self._rows[:0]
        if self._drafts:
            self._drafts.settle(step.drafts, accepted)
        for mini_batch in step.mini_batches:
            for chunk in mini_batch.prompts:
                sequence = self._residents.prompts[int(chunk["sequence_id"])]
                self.store.tails.advance_prompt(sequence, int(chunk["num_rows"]))
                if sequence.in_prompt:
                    self.store.prefixes.kept.keep(sequence)
                else:
                    self.lifecycle.finish_prompt(sequence)
        for sequence_id in step.arrived:
            sequence = self._residents.prompts[sequence_id]
            self.store.tails.fill_prompt(sequence)
            self.lifecycle.finish_prompt(sequence)

    def prefilled(self, job_id: int, now_seconds: float = 0.0, missed: Collection[int] = ()) -> bool:
        """Handle a prompt that prefill workers have computed and stored. The next step samples its first token.
        ``missed``: tickets of R-workers that could not be reached. If their tokens have no other copy, the prompt has
        failed. Return False if it has failed, or if the sequence was aborted, lost or preempted meanwhile.
        """
        if missed and not self.remote_prompts.drop_missed(job_id, missed):
            self.prefill_failed(job_id, now_seconds)
            return False
        return self.remote_prompts.computed(job_id, now_seconds)

    def prefill_failed(self, job_id: int, now_seconds: float = 0.0) -> None:
        """Queue the sequence of the failed job ``job_id`` by age. A job fails, for example, if its worker is lost."""
        sequence = self.remote_prompts.failed(job_id, now_seconds)
        if sequence is not None:
            self.store.leave(sequence, keep=False)
            self.lifecycle.begin_again(sequence)

    def finish(self, sequence: TokenSequence, reason: str = "abort") -> None:
        """Remove ``sequence``, which waits or runs. Its blocks become a prefix, or are released with the next step.
        ``reason``: "stop", "length", "abort" or "error". Siblings that are not forked yet are removed too.
        """
        if sequence in self._residents:
            self.lifecycle.end(sequence, keep=reason != "error")
            self.admission.future.output_lengths.finished(len(sequence.output_token_ids), was_cut=reason != "stop")
        else:
            self.queue.discard(sequence)

    def _most_rows(self, num_decodes: int) -> int:
        """Return the most rows that this step may have, with ``num_decodes`` decodes and prompts together."""
        seats, budget = self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        control = self.admission.load_control
        if not control.bounds_rows:
            return budget
        kv_loads = self._table.kv_loads(len(self.store.workers))
        return control.most_rows(kv_loads, 1 - num_decodes / seats, seats, budget)

    def _prompt_chunks(self, num_decodes: int) -> tuple[list[Chunk], int]:
        """Return the step's prompt chunks, and how many requests start.
        Prompts that have started come first, then as many new prompts as the budgets allow beside ``num_decodes``
        decodes.
        """
        if not self._residents.prompts and not len(self.queue):
            return [], 0
        budget = self._most_rows(num_decodes) - num_decodes
        cutter = ChunkCutter(self.store, self._schedule.prefill, budget)
        for sequence in self._residents.prompts.values():
            if not sequence.job_id:
                cutter.cut(sequence)
        self.admission.begin_step()
        prefills = self._prefills

        def would_begin(num_tokens: int, context_len: int) -> bool:
            here = cutter.rows_for(num_tokens) > 0
            return here or (prefills is not None and prefills.takes(num_tokens, context_len))

        while started := self.lifecycle.carry_out(self.admission.start_next(would_begin)):
            if prefills is None or not prefills.start(started):
                cutter.cut(started)
        return cutter.chunks, self.admission.num_starts
