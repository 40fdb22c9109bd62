"""The product's own cycle over naive R-workers; every promise of every step is recounted from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from fastdecode.core.step import Chunk, ScheduledStep
from fastdecode.cycle import Companion, Cycle, Membership, RunningCycle
from fastdecode.scheduler import SCHEDULES, Limits, Prefill, Scheduler, Sequence
from helpers.drafting import AlwaysMost
from helpers.naive_prefills import NaivePrefills, SomePrompts
from helpers.naive_world import NaiveWorld, StepFailedError

OUTPUT_TOKEN, WRONG_TOKEN = 7, 8

AMPLE = Limits(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    num_mini_batches=2,
    scratch_tokens=1 << 20,
    max_model_len=4096,
    block_size=16,
    num_blocks=(1 << 20,),
    bandwidths=(1.0,),
    prefix_caching=False,
)


@dataclass
class Job:
    """A user's request. ``lengths``: the real number of output tokens of each sample."""

    prompt: list[int]
    max_tokens: int
    lengths: list[int]
    arrives: int = 0
    aborts: int | None = None


@dataclass(frozen=True)
class Join:
    """An R-worker that joins a run."""

    num_blocks: int
    bandwidth: float


@dataclass(frozen=True)
class Drain:
    """An R-worker, by number, that drains."""

    worker: int


class RunScheduler(Scheduler):
    """A scheduler whose run checks the blocks after each commit; it passes on step times only if the run has some."""

    run: Run

    def commit(self, step: ScheduledStep, accepted: Mapping[int, int] = MappingProxyType({})) -> None:
        super().commit(step, accepted)
        self.run.check_decoding_blocks()

    def observe(self, *args: Any) -> None:
        if self.run.seconds_per_token or not self.run.in_turn:
            super().observe(*args)


@dataclass
class Run(Companion):
    """One workload through one scheduler. Without ``recounts`` only loads and starts are recorded, for long runs.

    ``seconds_per_token``: busy time of each R-worker that the scheduler is told; None: nothing is told. If ``limits``
    allow drafts, some wanted drafts are proposed, right and wrong, by ``drafts_seed``. With ``prefills_seed``, prefill
    workers compute some prompts.
    """

    schedule: str
    limits: Limits
    jobs: list[Job]
    recounts: bool = True
    seconds_per_token: tuple[float, ...] = ()
    drafts_seed: int = 0
    prefills_seed: int | None = None
    step_number: int = field(default=0, init=False, repr=False)
    members: list[list[Sequence]] = field(default_factory=list, init=False, repr=False)
    alive: dict[int, Sequence] = field(default_factory=dict, init=False, repr=False)
    kv_loads: list[list[int]] = field(default_factory=list, init=False, repr=False)
    starts: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    in_turn: bool = field(default=False, init=False, repr=False)
    has_preempted: bool = field(default=False, init=False, repr=False)
    _started: set[int] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        policy = AlwaysMost() if self.limits.num_speculative_tokens else None
        prompts = None if self.prefills_seed is None else SomePrompts()
        self.scheduler = RunScheduler(SCHEDULES[self.schedule], self.limits, prompts, policy)
        self.scheduler.run = self
        self._rng = np.random.default_rng(self.drafts_seed)
        self.world = NaiveWorld(self.scheduler, self.recounts, self._look_at)
        self.naive = self.world.naive
        self.membership = Membership()
        self.prefills = NaivePrefills(self.naive, self.prefills_seed or 0)
        self._arrived: tuple[int, ...] = ()
        self.cycle = Cycle(self.scheduler, self.world, self, [self, self.prefills])
        self._hopeless: list[Sequence] = []
        for number, job in enumerate(self.jobs):
            group = [Sequence(100 * number + i, job.prompt, job.max_tokens) for i in range(len(job.lengths))]
            group[0].siblings = tuple(group[1:])
            self.members.append(group)

    @property
    def num_moves(self) -> int:
        """The number of moves and pieces of copies until now."""
        return self.world.num_transfers

    def to_the_end(
        self,
        fail_steps: frozenset[int] = frozenset(),
        losses: dict[int, int] | None = None,
        changes: dict[int, Join | Drain] | None = None,
        moves_per_step: int = 0,
    ) -> None:
        """Run until every job has arrived and ended or was aborted, and nothing is left.

        ``losses``: lost worker by step. ``changes``: joins and drains by step.
        """
        while self.step_number <= max(job.arrives for job in self.jobs) or self.alive:
            self.arrive_and_abort()
            if self.alive:
                lost = (losses or {}).get(self.step_number)
                within = lost is not None and bool(self.limits.placing.segment_tokens % 3)
                self.step(fails=self.step_number in fail_steps, loses=lost if within else None)
                if lost is not None and not within:
                    self.lose(lost)
            self._change((changes or {}).get(self.step_number))
            self.move(moves_per_step)
            self.step_number += 1
            assert self.step_number < 5000, "the scheduler starves a sequence"
        if self.recounts:
            self._check_end()

    def one_step(self) -> None:
        """Run one step without losses, changes and moves."""
        self.arrive_and_abort()
        self.step()
        self.step_number += 1

    def _check_end(self) -> None:
        self.naive.apply(self.scheduler.schedule())
        workers, held = self.scheduler.snapshot().r_workers, self.naive.held
        assert self.limits.state_blocks or all(sequence_id < 0 for _, sequence_id in held)
        assert len(held) == self.scheduler.snapshot().num_prefixes
        used = self.naive.blocks_used(len(workers))
        assert used == [worker.num_blocks - worker.free for worker in workers]
        assert sum(used) == sum(worker.retained for worker in workers)
        self.scheduler.store.prefixes.reset()
        self.naive.apply(self.scheduler.schedule())
        known = self.scheduler.snapshot()
        assert self.naive.held == {} and all((w.free, w.retained) == (w.num_blocks, 0) for w in known.r_workers)
        assert not self.scheduler.has_unfinished and not known.num_waiting and not known.has_controls
        assert known.scratch_free == self.limits.scratch_tokens
        assert not self.scheduler.store.prefixes.is_awaited

    def step(self, fails: bool = False, loses: int | None = None) -> ScheduledStep:
        """Run and check one step. ``loses``: an R-worker that is lost before the step's tokens are taken."""
        self._num_preemptions = self.scheduler.statistics.preemptions
        self.world.fails, self.world.slowness = fails, self.seconds_per_token
        self.world.loses = () if loses is None else (loses,)
        self.world.recounts = self.recounts
        self.in_turn = True
        with suppress(StepFailedError):
            self.cycle.turn()
        self.in_turn = False
        assert self.world.step
        return self.world.step

    def _look_at(self, step: ScheduledStep, chunks: list[Chunk]) -> None:
        """Check ``step`` after the R-workers received its controls."""
        self.has_preempted = self.scheduler.statistics.preemptions > self._num_preemptions
        self.kv_loads.append(step.kv_loads)
        self.starts += [(self.step_number, i) for i in (c.sequence_id for c in chunks) if i not in self._started]
        self._started |= {chunk.sequence_id for chunk in chunks}
        if self.recounts:
            self._recount(step, chunks)

    def prepare(self, cycle: Cycle) -> None:
        """Propose some of the wanted drafts, right and wrong ones."""
        wanted = self.scheduler.drafts.grant()
        assert all(self._decodes(self.alive[i]) and count > 0 for i, count in wanted.items())
        most = self._rng.integers(0, 10, len(wanted)).tolist()
        counts = {i: min(count, length) for (i, count), length in zip(wanted.items(), most, strict=True)}
        right = {i: self._rng.random(count) < 0.7 for i, count in counts.items()}
        tokens = {i: np.where(each, OUTPUT_TOKEN, WRONG_TOKEN).tolist() for i, each in right.items()}
        self.scheduler.drafts.propose(tokens)

    def begun(self, step: ScheduledStep, now_seconds: float = 0.0) -> None:
        """Record the step, as a companion and as the requests."""
        self._arrived = step.arrived

    def accepted(self, step: ScheduledStep, computed: list[Chunk]) -> dict[int, int]:
        """Return how many first drafts of each sequence are right."""
        return {i: (*tokens, WRONG_TOKEN).index(WRONG_TOKEN) for i, tokens in step.drafts.items()}

    def _recount(self, step: ScheduledStep, chunks: list[Chunk]) -> None:
        self._check_order(step)
        for chunk in chunks:
            self._check_chunk(chunk, step.drafts.get(chunk.sequence_id, []))
        assert set(step.drafts) <= {chunk.sequence_id for chunk in chunks if chunk.is_decode}
        self._check_budgets(step, chunks)
        self._check_the_head_waits_for_something(step)
        self.naive.write(chunks)
        self._check_blocks()
        self._check_holders()
        assert self.scheduler.snapshot().num_prefixes <= self.limits.kept_states

    def arrive_and_abort(self) -> None:
        """Let jobs arrive and abort between steps."""
        for job, group in zip(self.jobs, self.members, strict=True):
            if job.arrives == self.step_number:
                self.scheduler.add(group[0])
                self.alive |= {member.sequence_id: member for member in group}
            if job.aborts == self.step_number and job.arrives <= self.step_number:
                for member in group:
                    self._finish(member, "abort")

    def lose(self, worker: int) -> list[Sequence]:
        """Lose an R-worker with all that it held; return the requests that no other could hold."""
        self._hopeless.clear()
        self.world.loses = (worker,)
        assert self.cycle.tell() == (worker,)
        return [*self._hopeless]

    def give_up(self, cycle: RunningCycle, sequence: Sequence) -> None:
        """End a request for which no R-worker has room."""
        self._hopeless.append(sequence)
        for member in (sequence, *sequence.siblings):
            self._finish(member, "error")

    def _change(self, change: Join | Drain | None) -> None:
        if isinstance(change, Join):
            self.scheduler.members.join(change.num_blocks, change.bandwidth)
        elif change:
            self.scheduler.members.drain(change.worker)

    def move(self, most: int) -> None:
        """Move at most ``most`` sequences, and dismiss drained R-workers."""
        self._hopeless.clear()
        if most:
            self.world.clock += most - 1  # all copies but the last may take this long
            self.membership.before(self.cycle)
        else:
            self.membership.let_go(self.cycle)
        assert not self._hopeless

    def _check_order(self, step: ScheduledStep) -> None:
        ids = [chunk.sequence_id for mini_batch in step.mini_batches for chunk in mini_batch]
        assert max(Counter(ids).values(), default=1) == 1, "a sequence is in two chunks"
        for mini_batch in step.mini_batches:
            order = [(chunk.worker, not chunk.attends) for chunk in mini_batch]
            assert order == sorted(order)

    def _check_chunk(self, chunk: Chunk, drafts: list[int]) -> None:
        """Check that right tokens follow right tokens, whatever was forked, retained or recomputed."""
        member = self.alive[chunk.sequence_id]
        range_tokens = self.limits.placing.segment_tokens
        tokens = [*member.prompt_token_ids, *member.output_token_ids]
        end = chunk.context_len + len(chunk.token_ids)
        assert chunk.base <= chunk.context_len < end <= chunk.base + range_tokens
        assert chunk.copy != chunk.worker
        assert all(held.tokens == tokens[chunk.base : chunk.context_len] for held in self.naive.of(chunk))
        starts = range(0, chunk.base, range_tokens) if chunk.attends else ()
        assert [start for _, _, start in chunk.reads] == list(starts)
        for worker, range_id, start in chunk.reads:
            assert self.naive.held[worker, range_id].tokens == tokens[start : start + range_tokens]
        assert list(chunk.token_ids) == [*tokens, *drafts][chunk.context_len : end] and len(chunk.token_ids) > 0
        if chunk.is_decode:
            assert len(chunk.token_ids) == 1 + len(drafts) and chunk.attends and chunk.samples
            assert end == len(tokens) + len(drafts) and chunk.scored == bool(drafts)
            assert member.output_token_ids and len(member.output_token_ids) + len(drafts) < member.max_tokens
        else:
            assert chunk.samples == (end == len(tokens)) and chunk.last_of_prompt == (end == member.num_prefill)

    def _check_budgets(self, step: ScheduledStep, chunks: list[Chunk]) -> None:
        """Check tokens, sequences, KV load and scratch, each counted anew, and that no decode waits needlessly."""
        prompts = SCHEDULES[self.schedule].prefill
        if prompts is not Prefill.UNBOUNDED:
            assert step.num_tokens <= self.limits.max_num_batched_tokens
        assert self.scheduler.snapshot().num_running <= self.limits.max_num_seqs
        decoding = {i for i, member in self.alive.items() if member.table is not None and self._decodes(member)}
        decoded = {chunk.sequence_id for chunk in chunks if chunk.is_decode}
        if prompts is Prefill.FIRST and len(decoded) < len(chunks):
            assert not decoded
        elif self.limits.kv_load_limit is None or self.schedule != "sls":
            assert decoded == decoding
        else:
            total = sum(self.limits.bandwidths)
            for load, bandwidth in zip(step.kv_loads, self.scheduler.store.workers.speeds.bandwidths, strict=True):
                assert load <= self.limits.kv_load_limit * bandwidth / total
        in_scratch = {c.sequence_id for c in chunks if not c.attends}
        assert sum(self.alive[i].num_prefill for i in in_scratch) <= self.limits.scratch_tokens

    def _check_the_head_waits_for_something(self, step: ScheduledStep) -> None:
        """Check that the oldest sequence waits for a seat, rows or blocks, or that starts are spread."""
        head, schedule = next(iter(self.scheduler.queue), None), SCHEDULES[self.schedule]
        if head is None or schedule.stabilizes_load or schedule.waves or self.limits.prefix_caching:
            return
        if self.limits.placing.twice or self.prefills_seed is not None:
            return  # it waits for blocks on two R-workers, or goes to prefill workers later
        if schedule.prefill is Prefill.FIRST and self.has_preempted:
            return  # blocks became free after the prompts were planned
        if head.max_cached > self.limits.placing.segment_tokens or self.scheduler.snapshot().draining:
            return  # its ranges need several places, or only draining R-workers could hold it
        members, workers = 1 + len(head.siblings), self.scheduler.store.workers
        partial = head.num_tokens % self.limits.block_size
        rows_left = self.limits.max_num_batched_tokens - step.num_tokens
        no_rows = rows_left < 1 if schedule.prefill is Prefill.CHUNKED else rows_left < head.num_tokens
        needed = workers.blocks_for(head.num_tokens) + (members - 1) * (self.limits.state_blocks + (partial > 0))
        if schedule.reserves_longest:
            needed = members * workers.blocks_for(self.limits.max_model_len)
        waits_for_blocks = all(
            workers.blocks_for(head.max_cached) > worker.num_blocks
            or needed + (0 if schedule.reserves_longest else len(self.scheduler.store.residents.on(index)))
            > worker.free
            for index, worker in enumerate(workers)
        )
        no_seat = self.scheduler.snapshot().num_running + members > self.limits.max_num_seqs
        decodes_wait = schedule.prefill is Prefill.FIRST and step.is_decode
        waits_for_rows = no_rows and schedule.prefill is not Prefill.UNBOUNDED and not decodes_wait
        assert no_seat or waits_for_blocks or waits_for_rows

    def _decodes(self, member: Sequence) -> bool:
        """Return whether a sequence decodes: it has output, and does not recompute its cache."""
        return bool(member.output_token_ids) and member.sequence_id not in self.scheduler.store.residents.prompts

    def _check_blocks(self) -> None:
        """Check the blocks that R-workers hold at the step's end against the scheduler's counts."""
        workers = self.scheduler.store.workers
        for used, worker in zip(self.naive.blocks_used(len(workers)), workers, strict=True):
            assert used <= worker.num_blocks - worker.free <= worker.num_blocks, (used, worker, self.naive.held)

    def _check_holders(self) -> None:
        """Check that exactly one R-worker, or two, holds all of a sequence."""
        for sequence in self.scheduler.store.residents.all:
            partial = next((each.target for each in self.scheduler.store.transfers if each.sequence is sequence), -1)
            held = [at for at, each in self.naive.held if each == sequence.segments[0].cache_id and at != partial]
            assert sequence.has_several or sorted(held) in (sorted(sequence.holders), [])
            assert len(sequence.holders) <= self.limits.placing.copies

    def check_decoding_blocks(self) -> None:
        """Check that decoding sequences have the blocks of their tokens, or one more after a move."""
        if not SCHEDULES[self.schedule].reserves_longest:
            for sequence in self.scheduler.store.residents.decoding.values():
                partial = sequence.num_cached % self.limits.block_size > 0
                # siblings that have not forked yet
                extra = len(sequence.siblings) * (self.limits.state_blocks + partial)
                *closed, tail = sequence.segments
                least, most = map(self.scheduler.store.workers.blocks_for, (tail.num_tokens, tail.num_tokens + 1))
                assert least + extra <= tail.num_blocks <= most + extra
                assert all(each.num_blocks * self.limits.block_size == each.num_tokens for each in closed), (
                    sequence,
                    tail,
                )

    def take(
        self, cycle: RunningCycle, computed: list[Chunk], accepted: Mapping[int, int], spoilt: Collection[int]
    ) -> int:
        """Fork, append the accepted tokens and one more to each sequence, and end finished ones."""
        sampled = [*self._arrived, *(chunk.sequence_id for chunk in computed if chunk.samples)]
        for parent in [self.alive[sequence_id] for sequence_id in sampled if sequence_id not in spoilt]:
            grown = [parent, *parent.siblings]
            self.scheduler.store.fork_siblings(parent)
            for member in grown:
                for _ in range(1 + accepted.get(member.sequence_id, 0)):
                    self._append(member)
        return 0

    def _append(self, member: Sequence) -> None:
        if member.sequence_id not in self.alive:
            return  # the sequence ended before all accepted tokens
        member.append(OUTPUT_TOKEN)
        number, index = divmod(member.sequence_id, 100)
        if len(member.output_token_ids) == self.jobs[number].lengths[index]:
            cut = len(member.output_token_ids) == member.max_tokens
            self._finish(member, "length" if cut else "stop")

    def _finish(self, member: Sequence, reason: str) -> None:
        if self.alive.pop(member.sequence_id, None):
            self.scheduler.finish(member, reason)
