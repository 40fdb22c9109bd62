"""The one authority over what runs in the next step: decodes, prompt chunks, starts, preemption. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence as PySequence

import numpy as np

from fastdecode.scheduler.admission import Admission
from fastdecode.scheduler.balance import BalanceFinder
from fastdecode.scheduler.blocks import BlockLedger
from fastdecode.scheduler.fleet import Fleet
from fastdecode.scheduler.limits import Limits
from fastdecode.scheduler.migration import Migration, Move
from fastdecode.scheduler.mini_batches import deal
from fastdecode.scheduler.policy import Policy, Prompts
from fastdecode.scheduler.prefix_cache import PrefixCache
from fastdecode.scheduler.prompt_chunks import ChunkCutter
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.statistics import SchedulerStatistics
from fastdecode.scheduler.waiting_queue import WaitingQueue
from fastdecode.step import Chunk, MiniBatch, ScheduledStep

logger = logging.getLogger(__name__)

MOST_PROMPT_ROWS = 0.05
"""Of the KV tokens attended: more rows of prompts, which R-workers store, would count as slowness."""


class Scheduler:
    """One rule with three budgets: tokens per step, KV tokens attended per step and R-worker, KV blocks.

    The oldest come first everywhere: a sequence starts only when all older ones have, unless those wait for a prefix
    that is being computed; and when blocks run out, the youngest are preempted and computed again later. So the oldest
    always goes on, and everybody ends.
    """

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy = policy
        self.limits = limits
        self.ledger = BlockLedger(limits.num_blocks, limits.block_size)
        self.prefix_cache = PrefixCache(self.ledger, limits.prefix_caching and not policy.reserves_longest)
        self.residents = Residents(self.ledger, self.prefix_cache, limits.scratch_tokens, limits.max_num_seqs)
        self.queue = WaitingQueue(self.prefix_cache)
        self.fleet = Fleet(limits.bandwidths)
        self.admission = Admission(policy, limits, self.residents, self.queue, self.fleet)
        self._migration = Migration(self.residents, self.admission, self.fleet, limits.seconds_per_moved_token)
        self.num_preemptions = 0
        self._rows = np.zeros(0, np.int64)
        self._balance = BalanceFinder()
        if limits.balanced_kv_tokens is not None and limits.kv_load_limit is None:
            self.balance_at(limits.balanced_kv_tokens)

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
        return self.admission.load_control.limit if self.policy.stabilizes_load else None

    @property
    def seeks_balance(self) -> bool:
        """True where no load limit was given and none is known, so that one is to be found."""
        known = self.limits.balanced_kv_tokens is not None
        return self.policy.stabilizes_load and not self.admission.load_control.is_strict and not known

    @property
    def statistics(self) -> SchedulerStatistics:
        """What was counted since the start."""
        cache = self.prefix_cache
        return SchedulerStatistics(cache.num_queries, cache.num_hit_tokens, self.num_preemptions)

    def observe(self, step: ScheduledStep, s_seconds: float, wait_seconds: float, r_seconds: PySequence[float]) -> None:
        """How long ``step`` took: each R-worker's part of the load, moves, and the limit where none is given, follow.

        ``wait_seconds``: the S-worker's for R-workers. ``r_seconds``: busy, of each R-worker.
        """
        kv_loads = step.kv_loads
        if step.only_decodes_attend and step.num_prompt_rows <= MOST_PROMPT_ROWS * sum(kv_loads):
            self.fleet.observe(kv_loads, r_seconds)
            self.admission.load_control.follow(self.fleet.speeds)
        self._migration.observe(step, s_seconds, wait_seconds, r_seconds)
        if self.seeks_balance and step.is_decode:
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

    def schedule(self) -> ScheduledStep:
        """The next step. Controls are handed over once: the caller applies them even if the step fails later."""
        if self.policy.prompts is Prompts.FIRST:
            self.residents.table.refresh()
            chunks = self._prompt_chunks(self.limits.max_num_batched_tokens)
            self._rows = np.zeros(0, np.int64) if chunks else self._decode_rows()
        else:
            self._rows = self._decode_rows()
            chunks = self._prompt_chunks(self._most_rows() - len(self._rows))
        decodes = self.residents.table.mini_batch(self._rows)
        mini_batches = deal(decodes, chunks, self.limits.num_mini_batches)
        return ScheduledStep(mini_batches, self.residents.take_controls(), self.admission.num_starts)

    def controls_alone(self) -> ScheduledStep:
        """A step without rows, which only tells the R-workers what they have yet to hear."""
        return ScheduledStep((MiniBatch.of([]),), self.residents.take_controls())

    def take_back(self, step: ScheduledStep) -> None:
        """The R-workers refused ``step``: its controls go before any that came since."""
        self.residents.put_back(step.controls)

    def commit(self, step: ScheduledStep) -> None:
        """The step's rows, those of the last ``schedule``, are in the caches now."""
        self.residents.table.advance(self._rows)
        self._rows = self._rows[:0]
        for mini_batch in step.mini_batches:
            for chunk in mini_batch.prompts:
                sequence = self.residents.prompts[int(chunk["sequence_id"])]
                sequence.num_cached += int(chunk["num_rows"])
                if not sequence.in_prompt:
                    self.residents.finish_prompt(sequence)
                    self.queue.release_followers(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """``parent``'s prompt is cached: its siblings start from a shared copy and decode from here on."""
        self.residents.fork_siblings(parent)

    def finish(self, sequence: Sequence, reason: str = "abort") -> None:
        """Forget a sequence, waiting or running; its blocks are retained or released with the next step.

        ``reason``: "stop", "length", "abort" or "error". Siblings that are not forked yet go with the sequence that
        brings them.
        """
        if sequence in self.residents:
            self.residents.leave(sequence, keep=reason != "error")
            self.queue.release_followers(sequence)
            self.admission.output_lengths.finished(len(sequence.output_token_ids), was_cut=reason != "stop")
        else:
            self.queue.discard(sequence)

    def lost(self, worker: int) -> list[Sequence]:
        """R-worker ``worker`` is gone: what it held is queued to be computed again on the others, by age.

        Returns the waiting sequences that none of the others could hold; they are forgotten.
        """
        for sequence in self.residents.lose(worker):
            self.queue.release_followers(sequence)
            self.queue.push(sequence)
        self.admission.load_control.lose(worker)
        self.fleet.lose(worker)
        hopeless = [sequence for sequence in self.queue.everybody if not self.admission.fits_somewhere(sequence)]
        for sequence in hopeless:
            self.queue.discard(sequence)
            self.queue.release_followers(sequence)
        return hopeless

    def join(self, num_blocks: int, bandwidth: float) -> None:
        """One more R-worker, next in number; as long as it is less loaded than others, sequences move to it."""
        self.residents.join(num_blocks)
        self.admission.load_control.join(self.fleet.join(bandwidth))
        self._migration.even_out(self.ledger.num_workers - 1)

    def drain(self, worker: int) -> None:
        """R-worker ``worker`` is to go: nothing starts there that could run elsewhere, and what is there moves away."""
        self.fleet.drain(worker)

    def drained(self) -> list[int]:
        """R-workers that were to go, hold no sequence any more, and are not waited for: never the last."""
        return [
            worker
            for worker in self.fleet.draining
            if self.fleet.accepting
            and not self.residents.num_on(worker)
            and all(map(self.admission.fits_elsewhere, self.queue.everybody))
        ]

    def next_move(self) -> Move | None:
        """Between steps: a sequence whose cache is to be copied, after ``controls_alone``; then comes ``moved``.

        Those that must leave an R-worker, but for whom no other has room, are preempted.
        """
        for sequence in self._migration.homeless():
            self._preempt(sequence)
        return self._migration.next()

    def moved(self, move: Move, seconds: float) -> None:
        """The cache was copied in ``seconds``, during which no step ran; the old one is released with the next step."""
        self._migration.moved(move, seconds)

    def reset_prefix_cache(self) -> None:
        """Forget every retained prefix; running sequences go on."""
        self.residents.reset_prefix_cache()

    def _decode_rows(self) -> np.ndarray:
        """Rows of the table that decode in this step, with the blocks they need; int64 [n]."""
        table = self.residents.table
        while True:
            table.refresh()
            rows = self._within_load_limit()
            growing = rows[table.chunks["context_len"][rows] // self.limits.block_size >= table.num_blocks[rows]]
            needed = np.bincount(table.chunks["worker"][growing], minlength=self.ledger.num_workers)
            lacking = np.flatnonzero(needed > self.ledger.free).tolist()
            short = [worker for worker in lacking if not self.residents.make_room(worker, int(needed[worker]))]
            if not short:
                self.residents.grow(growing)
                return rows
            self._preempt(self._victim(short[0]))

    def _most_rows(self) -> int:
        """Of this step, prompts' included."""
        seats, budget = self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        if not self.policy.stabilizes_load:
            return budget
        kv_loads = self.residents.table.kv_loads(self.ledger.num_workers)
        return self.admission.load_control.most_rows(kv_loads, 1 - len(self._rows) / seats, seats, budget)

    def _within_load_limit(self) -> np.ndarray:
        """All rows, but for the youngest where expected lengths were exceeded and a strict limit would be."""
        table = self.residents.table
        rows = np.arange(len(table.chunks))
        if not (self.policy.stabilizes_load and self.admission.load_control.is_strict):
            return rows
        limits = self.admission.load_control.limits.copy()
        for prompt in self.residents.prompts.values():
            limits[prompt.worker] -= 0 if prompt.uses_scratch else prompt.num_prefill
        running = np.ones(len(rows), bool)
        for worker in np.flatnonzero(table.kv_loads(len(limits)) > limits):
            here = rows[table.chunks["worker"] == worker]
            oldest_first = here[np.argsort(table.chunks["sequence_id"][here])]
            load = np.cumsum(table.chunks["context_len"][oldest_first] + 1)
            running[oldest_first[load > limits[worker]]] = False
        return rows[running]

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
        cutter = ChunkCutter(self.policy.prompts, budget)
        for sequence in self.residents.prompts.values():
            cutter.cut(sequence)
        self.admission.begin_step()
        while started := self.admission.start_next(cutter.rows_for):
            cutter.cut(started)
        return cutter.chunks
