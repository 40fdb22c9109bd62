"""The one authority over what runs in the next step: decodes, prompt chunks, starts, preemption. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from fastdecode.core.protocols import DraftPolicy, PrefillPolicy
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep, deal
from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.policy.attend import Attendance
from fastdecode.scheduler.policy.drafts import DraftCounts, Drafts
from fastdecode.scheduler.policy.load_control import BalanceFinder
from fastdecode.scheduler.policy.prefills import RemotePrompts
from fastdecode.scheduler.policy.transfers import Transfers
from fastdecode.scheduler.schedules import ChunkCutter, Limits, Prefill, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.losses import Losses
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.store.transfer import Transfer
from fastdecode.scheduler.waiting import WaitingQueue

logger = logging.getLogger(__name__)

MOST_PROMPT_ROWS = 0.05
"""Of the KV tokens attended: more rows of prompts, which R-workers store, would count as slowness."""


@dataclass(frozen=True)
class SchedulerStatistics:
    """Requests whose prefix was looked up, prompt tokens that were found, and preemptions."""

    prefix_queries: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def since(self, before: SchedulerStatistics) -> SchedulerStatistics:
        """What was counted after ``before``."""
        return SchedulerStatistics(
            self.prefix_queries - before.prefix_queries,
            self.prefix_hit_tokens - before.prefix_hit_tokens,
            self.preemptions - before.preemptions,
            self.drafts.since(before.drafts),
        )


class Scheduler:
    """One rule with three budgets: tokens per step, KV tokens attended per step and R-worker, KV blocks.

    The oldest come first everywhere: a sequence starts only when all older ones have, unless those wait for a prefix
    that is being computed; and when blocks run out, the youngest are preempted and computed again later. So the oldest
    always goes on, and all end.
    """

    def __init__(
        self,
        schedule: Schedule,
        limits: Limits,
        prefill_policy: PrefillPolicy | None = None,
        draft_policy: DraftPolicy | None = None,
    ) -> None:
        """``prefill_policy``: of the prefill workers, where there are some; ``draft_policy``: where tokens are
        drafted."""
        self.limits = limits
        self.store = Store(limits, retains=not schedule.reserves_longest)
        self.workers, self.residents = self.store.workers, self.store.residents
        self.queue = WaitingQueue(self.store.prefixes)
        self.admission = Admission(schedule, limits, self.store, self.queue)
        self.remote_prompts = RemotePrompts(self.store, prefill_policy)
        self.drafts = Drafts(self.store, limits, draft_policy)
        self._schedule = schedule
        self._losses = Losses(self.store)
        self.transfers = Transfers(self.store, self.admission, limits)
        self._attendance = Attendance(self.store) if limits.kv_replicas > 1 else None
        self._table = self.store.table
        self._committed: tuple[MiniBatch, ...] = ()
        self.num_preemptions = 0
        self._rows = np.zeros(0, np.int64)
        self._sound: dict[int, int] = {}
        self._balance = BalanceFinder()
        if limits.balanced_kv_tokens is not None and limits.kv_load_limit is None:
            self.balance_at(limits.balanced_kv_tokens)

    def with_limits(self, limits: Limits) -> Scheduler:
        """A new scheduler of the same schedule."""
        return Scheduler(self._schedule, limits, self.remote_prompts.policy, self.drafts.policy)

    @property
    def has_unfinished(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(len(self.queue) or len(self.residents))

    @property
    def has_controls(self) -> bool:
        """True while some R-worker has yet to be told of a fork or a release."""
        return self.store.has_controls

    @property
    def kv_load_limit(self) -> int | None:
        """KV tokens attended per step over all R-workers; None where nothing limits them, or nothing yet."""
        return self.admission.load_control.limit if self._schedule.stabilizes_load else None

    @property
    def seeks_balance(self) -> bool:
        """True where no load limit was given and none is known, so that one is to be found."""
        known = self.limits.balanced_kv_tokens is not None
        return self._schedule.stabilizes_load and not self.admission.load_control.is_strict and not known

    @property
    def statistics(self) -> SchedulerStatistics:
        """What was counted since the start."""
        cache = self.store.prefixes
        return SchedulerStatistics(
            cache.num_queries, cache.num_hit_tokens, self.num_preemptions, self.drafts.counts.copy()
        )

    def observe(self, step: ScheduledStep, s_seconds: float, wait_seconds: float, r_seconds: PySequence[float]) -> None:
        """How long ``step`` took: each R-worker's part of the load, moves, and the limit where none is given, follow.

        ``wait_seconds``: the S-worker's for R-workers. ``r_seconds``: busy, of each R-worker.
        """
        kv_loads = step.kv_loads
        if step.only_decodes_attend and step.num_prompt_rows <= MOST_PROMPT_ROWS * sum(kv_loads):
            self.workers.observe(kv_loads, r_seconds)
            if self._attendance:
                self._attendance.speeds.observe(kv_loads, r_seconds)
            self.admission.load_control.follow(self.workers.speeds)
        self.transfers.observe(step, s_seconds, wait_seconds, r_seconds)
        decodes = step.is_decode and step.num_tokens > 0  # a step may only sample first tokens of arrived prompts
        if self.drafts.policy and decodes:
            num_sequences = sum(map(len, step.mini_batches))
            self.drafts.policy.observe(step.num_tokens, num_sequences, kv_loads, s_seconds, wait_seconds, r_seconds)
        if self.seeks_balance and decodes:
            balanced = self._balance.observe(step.num_tokens, kv_loads, s_seconds, r_seconds)
            if balanced is not None:
                self.balance_at(balanced)
                logger.info("KV load limit: %d tokens per step, where R time equals S time", self.kv_load_limit)

    def balance_at(self, kv_tokens: int) -> None:
        """An R-worker of mean speed attends ``kv_tokens`` in the time of the S-part: that limits the load from now."""
        self.admission.load_control.balance_at(kv_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence (and the siblings it brings) by its age; RequestError when it could never run."""
        self.admission.room.check(sequence)
        self.queue.push(sequence)

    def drafts_wanted(self) -> dict[int, int]:
        """For how many tokens each sequence that decodes is to be drafted for the next step; see :meth:`propose`."""
        self._table.refresh()
        return self.drafts.wanted()

    def propose(self, drafts: Mapping[int, PySequence[int]]) -> None:
        """Draft tokens by sequence, at most ``num_speculative_tokens`` each; the next step verifies those that fit."""
        self.drafts.propose(drafts)

    def schedule(self, now_seconds: float = 0.0) -> ScheduledStep:
        """The next step. Controls are handed over once: the caller applies them even if the step fails later.

        ``now_seconds``: of any clock, for the policy of prefill workers.
        """
        self.remote_prompts.begin_step(now_seconds, len(self.queue))
        if self._schedule.prefill is Prefill.FIRST:
            self._table.refresh()
            chunks = self._prompt_chunks(self.limits.max_num_batched_tokens)
            self._rows = np.zeros(0, np.int64) if chunks else self._decode_rows()
        else:
            self._rows = self._decode_rows()
            chunks = self._prompt_chunks(self._most_rows() - len(self._rows))
        drafts = self._place_drafts(chunks)
        decodes = self._table.mini_batch(self._rows)
        mini_batches = deal(decodes, chunks, self.limits.num_mini_batches)
        prefills, arrived = self.remote_prompts.take()
        controls = self.store.take_controls()
        return ScheduledStep(mini_batches, controls, self.admission.num_starts, prefills, arrived, drafts)

    def controls_alone(self) -> ScheduledStep:
        """A step without rows, which only tells the R-workers what they have yet to hear."""
        self._sound, self._committed = {}, ()
        return ScheduledStep((MiniBatch.of([]),), self.store.take_controls())

    def take_back(self, step: ScheduledStep) -> None:
        """The R-workers refused ``step``: its controls go before any that came since."""
        self.store.put_back(step.controls)
        self.remote_prompts.put_back(step)

    def commit(self, step: ScheduledStep, accepted: Mapping[int, int] = MappingProxyType({})) -> None:
        """The step's rows, those of the last ``schedule``, are in the caches now.

        ``accepted``: how many draft tokens of each sequence are its next output tokens; none of those not listed.
        """
        self._sound, self._committed = self._table.cached_of_sharded(), step.mini_batches
        self._table.advance(self._rows)
        self._rows = self._rows[:0]
        self.drafts.settle(step.drafts, accepted)
        for mini_batch in step.mini_batches:
            for chunk in mini_batch.prompts:
                sequence = self.residents.prompts[int(chunk["sequence_id"])]
                self._table.num_cached[sequence.row] += chunk["num_rows"]
                self.store.go_on(sequence)
                if not sequence.in_prompt:
                    self._finish_prompt(sequence)
        for sequence_id in step.arrived:
            sequence = self.residents.prompts[sequence_id]
            self._table.num_cached[sequence.row] = sequence.num_prefill
            self._finish_prompt(sequence)

    def prefilled(self, job_id: int, now_seconds: float = 0.0) -> bool:
        """Prefill workers have computed a prompt, and its R-worker has it: the next step samples its first token.

        False where the sequence was meanwhile aborted, lost or preempted.
        """
        return self.remote_prompts.computed(job_id, now_seconds)

    def prefill_failed(self, job_id: int, now_seconds: float = 0.0) -> None:
        """A prompt was not computed, since a prefill worker was lost for instance: it is queued again, by age."""
        sequence = self.remote_prompts.failed(job_id, now_seconds)
        if sequence is not None:
            self.store.leave(sequence, keep=False)
            self.queue.release_followers(sequence)
            self.queue.push(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """``parent``'s prompt is cached: its siblings start from a shared copy and decode from here on."""
        self.store.fork_siblings(parent)

    def finish(self, sequence: Sequence, reason: str = "abort") -> None:
        """Forget a sequence, waiting or running; its blocks are retained or released with the next step.

        ``reason``: "stop", "length", "abort" or "error". Siblings that are not forked yet go with the sequence that
        brings them.
        """
        if sequence in self.residents:
            self.store.forget_unused(sequence)
            self.store.leave(sequence, keep=reason != "error")
            self.queue.release_followers(sequence)
            self.admission.future.output_lengths.finished(len(sequence.output_token_ids), was_cut=reason != "stop")
        else:
            self.queue.discard(sequence)

    def spoilt(self, workers: PySequence[int]) -> list[int]:
        """Of sequences that R-workers ``workers``, which are gone, had: those that lost something by it. Tokens of the
        last step are not theirs: they attended there, or have to be computed again."""
        attended = {each for worker in workers for each in self._attended_on(worker)}
        held = {each.sequence_id: each for worker in workers for each in self.residents.on(worker)}
        return [each for each, it in held.items() if each in attended or it.job_id or _loses_some(it, set(workers))]

    def _attended_on(self, worker: int) -> dict[int, int]:
        """Sequences whose rows of the last step attended on ``worker``, and what they had cached before it."""
        found: dict[int, int] = {}
        for mini_batch in self._committed:
            attended = (mini_batch.chunks["worker"] == worker) & mini_batch.chunks["attends"]
            attended[mini_batch.reads["chunk"][mini_batch.reads["worker"] == worker]] = True
            chunks = mini_batch.chunks[attended]
            found |= dict(zip(chunks["sequence_id"].tolist(), chunks["context_len"].tolist(), strict=True))
        return found

    def lost(self, worker: int) -> list[Sequence]:
        """R-worker ``worker`` is gone: sequences with a second copy go on from that; what else it held is queued to be
        computed again on the others, by age. Of sequences with several ranges only those that were lost are computed
        again, at once, if there is room for them.

        Returns the waiting sequences that none of the others could hold; they are forgotten.
        """
        self.transfers.lost()
        whole, broken, starved = self._losses.lose(worker, self._attended_on(worker), self._sound)
        for sequence in whole:
            self.queue.release_followers(sequence)
            self.queue.push(sequence)
        self.admission.load_control.lose(worker)
        for sequence in starved:
            self._preempt(sequence)
        for sequence in broken:
            self._mend(sequence)
        for sequence in self.residents.all:
            if sequence.max_cached > self.limits.range_tokens and not self.admission.room.fits_somewhere(sequence):
                self._preempt(sequence)
        hopeless = [sequence for sequence in self.queue.all if not self.admission.room.fits_somewhere(sequence)]
        for sequence in hopeless:
            self.queue.discard(sequence)
            self.queue.release_followers(sequence)
        return hopeless

    def _mend(self, sequence: Sequence) -> None:
        """Compute the lost ranges of ``sequence`` again, or all of it where there is no room for them now."""
        self.queue.release_followers(sequence)
        places = self.admission.segments.again(sequence) if self.admission.room.fits_somewhere(sequence) else None
        if places is None:
            self._preempt(sequence)
            return
        for segment, worker in places:
            self.store.place(sequence, segment, worker)
        self.store.go_on(sequence)
        if not sequence.in_prompt:
            self._finish_prompt(sequence)

    def join(self, num_blocks: int, bandwidth: float, index: int | None = None, host: str = "") -> None:
        """One more R-worker, next in number or in a vacant place ``index``; as long as it is less loaded than others,
        sequences move to it."""
        index = len(self.workers) if index is None else index
        self.admission.load_control.join(index, self.workers.join(index, num_blocks, bandwidth, host))
        self.transfers.joined(index)
        if self._attendance:
            self._attendance.speeds.forget(index)

    def drain(self, worker: int) -> None:
        """R-worker ``worker`` is to go: nothing starts there that could run elsewhere, and what is there moves away."""
        self.workers.drain(worker)

    def drained(self) -> list[int]:
        """R-workers that were to go, hold no sequence any more, and are not waited for: never the last."""
        if not self.workers.draining:
            return []
        growing = [each for each in self.residents.all if each.max_cached > self.limits.range_tokens]
        return [
            worker
            for worker in self.workers.draining
            if self.workers.accepting
            and not self.workers[worker].num_copies
            and all(map(self.admission.room.fits_elsewhere, [*self.queue.all, *growing]))
        ]

    def next_transfer(self) -> Transfer | None:
        """Between steps: a copy to be made, after ``controls_alone``; then comes ``transferred``, or the next is asked.

        Sequences that must leave an R-worker, but for which no other has room, are preempted.
        """
        for sequence in self.transfers.begin():
            self._preempt(sequence)
        return self.transfers.next()

    def stands(self, transfer: Transfer) -> bool:
        """False where its sequence or one of its R-workers has gone since it was chosen: there is nothing to copy."""
        return transfer in self.store.transfers

    def transferred(self, transfer: Transfer, seconds: float) -> None:
        """The bytes were copied in ``seconds``, during which no step ran; a copy that is to go is released with the
        next step."""
        self.transfers.done(transfer, seconds)

    def reset_prefix_cache(self) -> None:
        """Forget every retained prefix; running sequences go on."""
        self.store.prefixes.reset()

    def _finish_prompt(self, sequence: Sequence) -> None:
        self.store.finish_prompt(sequence)
        self.queue.release_followers(sequence)

    def _decode_rows(self) -> np.ndarray:
        """Rows of the table that decode in this step, with the blocks they need; int64 [n]."""
        table = self._table
        while True:
            table.refresh()
            if self._attendance:
                self._attendance.choose()
            rows = self._within_load_limit()
            tail_lens = table.tail_lens(rows)
            if (tail_lens >= table.segment_tokens).any():
                self._extend(rows[tail_lens >= table.segment_tokens])
                continue
            growing = rows[tail_lens // self.limits.block_size >= table.num_blocks[rows]]
            needed = table.count_held(growing, 1, len(self.workers)).tolist()
            short = [worker for worker, count in enumerate(needed) if not self.store.prefixes.make_room(worker, count)]
            if not short:
                self.store.grow(growing)
                return rows
            self._make_way(short[0])

    def _extend(self, rows: np.ndarray) -> None:
        """The first of these rows of the table, whose tails are whole, gets a new tail, or a victim makes room."""
        sequence = self._table.sequence(int(rows[0]))
        worker, has_room = self.admission.segments.next_tail(sequence)
        if has_room:
            self.store.extend(sequence, [worker])
        elif worker >= 0:
            self._make_way(worker)
        else:
            self._preempt(sequence)

    def _make_way(self, worker: int) -> None:
        """R-worker ``worker`` needs blocks: copies that are not needed go first, then a sequence."""
        if not self.transfers.give_up(worker):
            self._preempt(self._victim(worker))

    def _place_drafts(self, chunks: list[Chunk]) -> dict[int, list[int]]:
        """The draft tokens of this step, beside its decodes and prompts."""
        num_rows = len(self._rows) + sum(len(chunk.token_ids) for chunk in chunks)
        strict = self._schedule.stabilizes_load and self.admission.load_control.is_strict
        limits = self.admission.load_control.limits if strict else None
        return self.drafts.place(self._rows, self.limits.max_num_batched_tokens - num_rows, limits)

    def _most_rows(self) -> int:
        """Of this step, prompts' included."""
        seats, budget = self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        control = self.admission.load_control
        if not self._schedule.stabilizes_load or not control.bounds_rows:
            return budget
        kv_loads = self._table.kv_loads(len(self.workers))
        return control.most_rows(kv_loads, 1 - len(self._rows) / seats, seats, budget)

    def _within_load_limit(self) -> np.ndarray:
        """All rows, but for the youngest where expected lengths were exceeded and a strict limit would be."""
        table = self._table
        rows = table.rows
        if not (self._schedule.stabilizes_load and self.admission.load_control.is_strict):
            return rows
        limits = self.admission.load_control.limits.copy()
        for prompt in self.residents.prompts.values():
            for each in prompt.segments if prompt.attends_in_prompt else ():
                limits[each.home] -= min(table.segment_tokens, prompt.num_prefill - each.start)
        for worker in np.flatnonzero(table.kv_loads(len(limits)) > limits):
            loads = table.loads_on(int(worker), rows)
            here, loads = rows[loads > 0], loads[loads > 0]
            by_age = np.argsort(table.chunks["sequence_id"][here])
            beyond = np.cumsum(loads[by_age]) > limits[worker]
            rows = rows[~np.isin(rows, here[by_age[beyond]])]
        return rows

    def _victim(self, worker: int) -> Sequence:
        """The youngest on ``worker``, but none that has got no token since it was preempted, and not the oldest."""
        here = self.residents.on(worker)
        for sequence in reversed(here[1:]):
            stuck = sequence.was_preempted and len(sequence.output_token_ids) == sequence.outputs_at_start
            if not stuck:
                return sequence
        return here[-1]

    def _preempt(self, sequence: Sequence) -> None:
        """Take the cache of ``sequence``; it will be computed again from its tokens."""
        self.store.leave(sequence, keep=True)
        sequence.was_preempted = True
        self.queue.release_followers(sequence)
        self.queue.push(sequence)
        self.num_preemptions += 1

    def _prompt_chunks(self, budget: int) -> list[Chunk]:
        """The next chunks of the prompts begun, then of as many new ones as the budgets allow."""
        cutter = ChunkCutter(self._schedule.prefill, budget, self.limits.range_tokens)
        for sequence in self.residents.prompts.values():
            if not sequence.job_id:
                cutter.cut(sequence)
        self.admission.begin_step()
        takes = self.remote_prompts.takes
        while started := self.admission.start_next(lambda rows, context: cutter.rows_for(rows) or takes(rows, context)):
            if not self.remote_prompts.start(started):
                cutter.cut(started)
        return cutter.chunks


def _loses_some(sequence: Sequence, workers: set[int]) -> bool:
    """Whether R-workers ``workers`` alone hold some segment of ``sequence``."""
    return any(segment.copies and set(segment.workers) <= workers for segment in sequence.segments)
