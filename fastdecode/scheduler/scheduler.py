"""The one authority over what runs in the next step: decodes, prompt chunks, starts, preemption. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from fastdecode.protocols import DraftPolicy, PrefillPolicy
from fastdecode.scheduler.admission import Admission
from fastdecode.scheduler.copies import Copies
from fastdecode.scheduler.drafts import DraftCounts, Drafts
from fastdecode.scheduler.load_control import BalanceFinder
from fastdecode.scheduler.losses import Losses
from fastdecode.scheduler.migration import Migration, Move
from fastdecode.scheduler.prefix import PrefixCache
from fastdecode.scheduler.remote_prompts import RemotePrompts
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.schedules import ChunkCutter, Limits, Prefill, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.waiting import WaitingQueue
from fastdecode.scheduler.worker_state import Workers
from fastdecode.step import Chunk, MiniBatch, ScheduledStep, deal

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
        self.workers = Workers(limits.num_blocks, limits.bandwidths, limits.block_size, limits.hosts)
        caches = limits.prefix_caching and not schedule.reserves_longest
        self.prefix_cache = PrefixCache(self.workers, caches, limits.range_tokens)
        self.residents = Residents(
            self.workers,
            self.prefix_cache,
            limits.scratch_tokens,
            limits.max_num_seqs,
            limits.num_speculative_tokens,
            limits.range_tokens,
        )
        self._losses = Losses(self.residents)
        self.queue = WaitingQueue(self.prefix_cache)
        self.admission = Admission(schedule, limits, self.residents, self.queue)
        self._schedule = schedule
        self.remote_prompts = RemotePrompts(self.residents, prefill_policy)
        self.drafts = Drafts(self.residents, limits, draft_policy)
        price = math.inf if limits.kv_replicas > 1 else limits.seconds_per_moved_token  # copies even the load instead
        self._migration = Migration(self.residents, self.admission, price)
        per_token = limits.seconds_per_moved_token
        self._copies = Copies(self.residents, self.admission, per_token) if limits.kv_replicas > 1 else None
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
        return self.residents.has_controls

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
        cache = self.prefix_cache
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
            if self._copies:
                self._copies.speeds.observe(kv_loads, r_seconds)
            self.admission.load_control.follow(self.workers.speeds)
        self._migration.observe(step, s_seconds, wait_seconds, r_seconds)
        if self._copies:
            self._copies.observe(s_seconds + wait_seconds)
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
        self.admission.check(sequence)
        self.queue.push(sequence)

    def drafts_wanted(self) -> dict[int, int]:
        """For how many tokens each sequence that decodes is to be drafted for the next step; see :meth:`propose`."""
        self.residents.table.refresh()
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
            self.residents.table.refresh()
            chunks = self._prompt_chunks(self.limits.max_num_batched_tokens)
            self._rows = np.zeros(0, np.int64) if chunks else self._decode_rows()
        else:
            self._rows = self._decode_rows()
            chunks = self._prompt_chunks(self._most_rows() - len(self._rows))
        drafts = self._place_drafts(chunks)
        decodes = self.residents.table.mini_batch(self._rows)
        mini_batches = deal(decodes, chunks, self.limits.num_mini_batches)
        prefills, arrived = self.remote_prompts.take()
        controls = self.residents.take_controls()
        return ScheduledStep(mini_batches, controls, self.admission.num_starts, prefills, arrived, drafts)

    def controls_alone(self) -> ScheduledStep:
        """A step without rows, which only tells the R-workers what they have yet to hear."""
        self._sound, self._committed = {}, ()
        return ScheduledStep((MiniBatch.of([]),), self.residents.take_controls())

    def take_back(self, step: ScheduledStep) -> None:
        """The R-workers refused ``step``: its controls go before any that came since."""
        self.residents.put_back(step.controls)
        self.remote_prompts.put_back(step)

    def commit(self, step: ScheduledStep, accepted: Mapping[int, int] = MappingProxyType({})) -> None:
        """The step's rows, those of the last ``schedule``, are in the caches now.

        ``accepted``: how many draft tokens of each sequence are its next output tokens; none of those not listed.
        """
        self._sound, self._committed = self.residents.table.cached_in_ranges(), step.mini_batches
        self.residents.table.advance(self._rows)
        self._rows = self._rows[:0]
        self.drafts.settle(step.drafts, accepted)
        for mini_batch in step.mini_batches:
            for chunk in mini_batch.prompts:
                sequence = self.residents.prompts[int(chunk["sequence_id"])]
                self.residents.table.num_cached[sequence.row] += chunk["num_rows"]
                self.residents.go_on(sequence)
                if not sequence.in_prompt:
                    self._finish_prompt(sequence)
        for sequence_id in step.arrived:
            sequence = self.residents.prompts[sequence_id]
            self.residents.table.num_cached[sequence.row] = sequence.num_prefill
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
            self.residents.leave(sequence, keep=False)
            self.queue.release_followers(sequence)
            self.queue.push(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """``parent``'s prompt is cached: its siblings start from a shared copy and decode from here on."""
        self.residents.fork_siblings(parent)

    def finish(self, sequence: Sequence, reason: str = "abort") -> None:
        """Forget a sequence, waiting or running; its blocks are retained or released with the next step.

        ``reason``: "stop", "length", "abort" or "error". Siblings that are not forked yet go with the sequence that
        brings them.
        """
        if sequence in self.residents:
            self.residents.forget_unused(sequence)
            self.residents.leave(sequence, keep=reason != "error")
            self.queue.release_followers(sequence)
            self.admission.output_lengths.finished(len(sequence.output_token_ids), was_cut=reason != "stop")
        else:
            self.queue.discard(sequence)

    def spoilt(self, workers: PySequence[int]) -> list[int]:
        """Of sequences that R-workers ``workers``, which are gone, had: those that lost something by it. Tokens of the
        last step are not theirs: they attended there, or have to be computed again."""
        attended = {each for worker in workers for each in self._attended_on(worker)}
        held = {each.sequence_id: each for worker in workers for each in self.residents.on(worker)}
        return [each for each, it in held.items() if each in attended or set(it.holders) <= set(workers)]

    def _attended_on(self, worker: int) -> dict[int, int]:
        """Sequences whose rows of the last step attended on ``worker``, and what they had cached before it."""
        found: dict[int, int] = {}
        for mini_batch in self._committed:
            chunks = mini_batch.chunks[(mini_batch.chunks["worker"] == worker) & mini_batch.chunks["attends"]]
            found |= dict(zip(chunks["sequence_id"].tolist(), chunks["context_len"].tolist(), strict=True))
        return found

    def lost(self, worker: int) -> list[Sequence]:
        """R-worker ``worker`` is gone: sequences with a second copy go on from that; what else it held is queued to be
        computed again on the others, by age. Of sequences with several ranges only those that were lost are computed
        again, at once, if there is room for them.

        Returns the waiting sequences that none of the others could hold; they are forgotten.
        """
        self._losses.of_copies(worker, self._attended_on(worker))
        broken = self._losses.of_ranges(worker, self._sound)
        for sequence in self._losses.of_whole(worker):
            self.queue.release_followers(sequence)
            self.queue.push(sequence)
        self.admission.load_control.lose(worker)
        for sequence in broken:
            self._mend(sequence)
        for sequence in self.residents.all:
            if sequence.max_cached > self.limits.range_tokens and not self.admission.fits_somewhere(sequence):
                self._preempt(sequence)
        hopeless = [sequence for sequence in self.queue.all if not self.admission.fits_somewhere(sequence)]
        for sequence in hopeless:
            self.queue.discard(sequence)
            self.queue.release_followers(sequence)
        return hopeless

    def _mend(self, sequence: Sequence) -> None:
        """Compute the lost ranges of ``sequence`` again, or all of it where there is no room for them now."""
        self.queue.release_followers(sequence)
        if not self.admission.fits_somewhere(sequence) or not self.admission.place_again(sequence):
            self._preempt(sequence)
            return
        self.residents.go_on(sequence)
        if not sequence.in_prompt:
            self._finish_prompt(sequence)

    def join(self, num_blocks: int, bandwidth: float, index: int | None = None, host: str = "") -> None:
        """One more R-worker, next in number or in a vacant place ``index``; as long as it is less loaded than others,
        sequences move to it."""
        index = len(self.workers) if index is None else index
        self.admission.load_control.join(index, self.workers.join(index, num_blocks, bandwidth, host))
        if self._copies:
            self._copies.joined(index)
        else:
            self._migration.even_out(index)

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
            and not self.workers[worker].num_ranges
            and all(map(self.admission.fits_elsewhere, [*self.queue.all, *growing]))
        ]

    def next_move(self) -> Move | None:
        """Between steps: a sequence whose cache is to be copied, after ``controls_alone``; then comes ``moved``.

        Those that must leave an R-worker, but for whom no other has room, are preempted.
        """
        if self._copies:
            self._copies.leave_draining()
        for sequence in self._migration.homeless():
            self._preempt(sequence)
        return self._migration.next() or (self._copies.next() if self._copies else None)

    def moved(self, move: Move, seconds: float) -> None:
        """The cache was copied in ``seconds``, during which no step ran; the old one is released with the next step,
        unless it stays."""
        if self._copies and move.keeps_source:
            self._copies.made(move, seconds)
        else:
            self._migration.moved(move, seconds)

    def reset_prefix_cache(self) -> None:
        """Forget every retained prefix; running sequences go on."""
        self.prefix_cache.reset()

    def _finish_prompt(self, sequence: Sequence) -> None:
        self.residents.finish_prompt(sequence)
        self.queue.release_followers(sequence)

    def _decode_rows(self) -> np.ndarray:
        """Rows of the table that decode in this step, with the blocks they need; int64 [n]."""
        table = self.residents.table
        while True:
            table.refresh()
            if self._copies:
                self._copies.choose()
            rows = self._within_load_limit()
            tail_lens = table.tail_lens(rows)
            if (tail_lens >= table.range_tokens).any():
                self._extend(rows[tail_lens >= table.range_tokens])
                continue
            growing = rows[tail_lens // self.limits.block_size >= table.num_blocks[rows]]
            needed = table.count_held(growing, 1, len(self.workers)).tolist()
            short = [worker for worker, count in enumerate(needed) if not self.prefix_cache.make_room(worker, count)]
            if not short:
                self.residents.grow(growing)
                return rows
            if not (self._copies and self._copies.give_up(short[0])):
                self._preempt(self._victim(short[0]))

    def _extend(self, rows: np.ndarray) -> None:
        """The first of these rows of the table, whose tails are whole, gets a new tail, or a victim makes room."""
        sequence = self.residents.decoding[int(self.residents.table.chunks["sequence_id"][rows[0]])]
        worker, has_room = self.admission.next_tail(sequence)
        if has_room:
            self.residents.extend(sequence, worker)
        else:
            self._preempt(self._victim(worker) if worker >= 0 else sequence)

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
        kv_loads = self.residents.table.kv_loads(len(self.workers))
        return control.most_rows(kv_loads, 1 - len(self._rows) / seats, seats, budget)

    def _within_load_limit(self) -> np.ndarray:
        """All rows, but for the youngest where expected lengths were exceeded and a strict limit would be."""
        table = self.residents.table
        rows = table.rows
        if not (self._schedule.stabilizes_load and self.admission.load_control.is_strict):
            return rows
        limits = self.admission.load_control.limits.copy()
        for prompt in self.residents.prompts.values():
            for each in prompt.ranges if prompt.attends_in_prompt else ():
                limits[each.worker] -= min(table.range_tokens, prompt.num_prefill - each.start)
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
        self.residents.leave(sequence, keep=True)
        sequence.was_preempted = True
        self.queue.release_followers(sequence)
        self.queue.push(sequence)
        self.num_preemptions += 1

    def _prompt_chunks(self, budget: int) -> list[Chunk]:
        """The next chunks of the prompts begun, then of as many new ones as the budgets allow."""
        cutter = ChunkCutter(self._schedule.prefill, budget)
        for sequence in self.residents.prompts.values():
            if not sequence.job_id:
                cutter.cut(sequence)
        self.admission.begin_step()
        takes = self.remote_prompts.takes
        while started := self.admission.start_next(lambda rows, context: cutter.rows_for(rows) or takes(rows, context)):
            if not self.remote_prompts.start(started):
                cutter.cut(started)
        return cutter.chunks
