"""The scheduler against a naive recount of everything it promises, step by step over random workloads."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.scheduler import Limits, Placement, Scheduler, Sequence
from fastdecode.scheduler.mini_batches import deal
from fastdecode.types import CONTROL, SPAN, Chunk, ScheduledStep, Verb


@dataclass
class Job:
    """A request as a user brings it: ``lengths`` holds the output tokens each of its samples will really have."""

    prompt_len: int
    max_tokens: int
    lengths: list[int]
    arrives: int = 0
    aborts: int | None = None


@dataclass
class Held:
    """What a naive R-worker knows of a sequence."""

    worker: int
    num_tokens: int


@dataclass
class Run:
    """Drives a scheduler as the engine does, and checks every step against a recount from scratch."""

    limits: Limits
    num_blocks: list[int]
    block_size: int
    jobs: list[Job]
    step_number: int = field(default=0, init=False, repr=False)
    members: list[list[Sequence]] = field(default_factory=list, init=False, repr=False)
    alive: set[int] = field(default_factory=set, init=False, repr=False)
    waiting: deque[int] = field(default_factory=deque, init=False, repr=False)
    admitted: list[int] = field(default_factory=list, init=False, repr=False)
    held: dict[int, Held] = field(default_factory=dict, init=False, repr=False)
    released: Counter[int] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, Placement(self.num_blocks, self.block_size))
        for number, job in enumerate(self.jobs):
            prompt = [1000 * number + i for i in range(job.prompt_len)]
            group = [Sequence(100 * number + i, prompt, job.max_tokens) for i in range(len(job.lengths))]
            group[0].siblings = tuple(group[1:])
            self.members.append(group)

    def to_the_end(self, fail_steps: frozenset[int] = frozenset()) -> None:
        """Every job arrives, is aborted or ends; then nothing is left anywhere."""
        while self.step_number <= max(job.arrives for job in self.jobs) or self.alive:
            self._arrive_and_abort()
            if self.alive:
                self.step(fails=self.step_number in fail_steps)
            self.step_number += 1
            assert self.step_number < 2000, "the scheduler starves somebody"
        self._apply(self.scheduler.schedule())
        assert self.held == {}
        assert self.scheduler.placement.blocks_free == self.num_blocks
        assert not self.scheduler.has_unfinished and not self.scheduler.has_controls
        assert (self.scheduler._unborn, self.scheduler._scratch_free) == (0, self.limits.scratch_tokens)
        assert self.scheduler.placement._held == {}
        assert set(self.released.values()) <= {1}

    def step(self, fails: bool = False) -> ScheduledStep:
        expected = self._expected_decodes()
        step = self.scheduler.schedule()
        self._note_admissions(step)
        self._apply(step)
        self._check_rows(step, expected)
        self._check_counts(step)
        assert step.num_tokens > 0, "nothing runs although somebody waits"
        if not fails:
            self.scheduler.commit(step)
            self._write(step)
            self._take(step)
        return step

    def _arrive_and_abort(self) -> None:
        for number, (job, group) in enumerate(zip(self.jobs, self.members, strict=True)):
            if job.arrives == self.step_number:
                self.scheduler.add(group[0])
                self.alive |= {member.sequence_id for member in group}
                self.waiting.append(number)
            if job.aborts == self.step_number and job.arrives <= self.step_number:
                for member in group:
                    if member.sequence_id in self.alive:
                        self._finish(member)
                if number in self.waiting:
                    self.waiting.remove(number)

    def _expected_decodes(self) -> set[int]:
        """Everybody who holds at least one output token and is not done gets one more."""
        return {
            m.sequence_id for group in self.members for m in group if m.sequence_id in self.alive and m.output_token_ids
        }

    def _note_admissions(self, step: ScheduledStep) -> None:
        """First come, first served: whoever shows up for the first time was at the head of the queue."""
        seen = [c for chunks in step.mini_batches for c in chunks if not c.is_decode and c.context_len == 0]
        new = {c.sequence_id // 100 for c in seen} - set(self.admitted)
        head = [self.waiting.popleft() for _ in new]
        assert new == set(head)
        self.admitted += head

    def _apply(self, step: ScheduledStep) -> None:
        """The controls, in order, on naive R-workers."""
        for worker, verbs in enumerate(step.controls):
            for verb, sequence_id, source_id, num_tokens in verbs:
                if verb == Verb.FORK:
                    source = self.held[source_id]  # a KeyError here: released before it was forked
                    assert source.worker == worker and source.num_tokens >= num_tokens and sequence_id not in self.held
                    self.held[sequence_id] = Held(worker, num_tokens)
                else:
                    assert verb == Verb.RELEASE
                    assert self.held.pop(sequence_id).worker == worker
                    self.released[sequence_id] += 1

    def _check_rows(self, step: ScheduledStep, expected_decodes: set[int]) -> None:
        chunks = [chunk for mini_batch in step.mini_batches for chunk in mini_batch]
        by_id = {chunk.sequence_id: chunk for chunk in chunks}
        assert len(by_id) == len(chunks), "a sequence is in two chunks"
        assert {chunk.sequence_id for chunk in chunks if chunk.is_decode} == expected_decodes
        for mini_batch in step.mini_batches:
            order = [(chunk.worker, not chunk.attends) for chunk in mini_batch]
            assert order == sorted(order)
        for group in self.members:
            for member in group:
                if member.sequence_id in by_id:
                    self._check_chunk(by_id[member.sequence_id], member)

    def _check_chunk(self, chunk: Chunk, member: Sequence) -> None:
        prompt, output = member.prompt_token_ids, member.output_token_ids
        held = self.held.get(chunk.sequence_id, Held(chunk.worker, 0))
        assert (chunk.worker, chunk.context_len) == (held.worker, held.num_tokens)
        end = chunk.context_len + len(chunk.token_ids)
        assert list(chunk.token_ids) == [*prompt, *output][chunk.context_len : end]
        if chunk.is_decode:
            assert len(chunk.token_ids) == 1 and chunk.attends and chunk.samples
            assert end == len(prompt) + len(output)
        else:
            assert len(chunk.token_ids) > 0 and end <= len(prompt)
            assert chunk.samples == chunk.last_of_prompt == (end == len(prompt))

    def _check_counts(self, step: ScheduledStep) -> None:
        """Tokens, sequences, blocks and scratch, each counted anew."""
        assert step.num_tokens <= self.limits.max_num_batched_tokens
        admitted = [self.members[number] for number in self.admitted]
        living = [[m for m in group if m.sequence_id in self.alive] for group in admitted]
        assert sum(map(len, living)) <= self.limits.max_num_seqs
        in_scratch = {c.sequence_id for chunks in step.mini_batches for c in chunks if not c.attends}
        in_scratch |= {group[0].sequence_id for group in living if group and group[0].uses_scratch}
        assert sum(len(self.members[i // 100][0].prompt_token_ids) for i in in_scratch) <= self.limits.scratch_tokens
        free = list(self.num_blocks)
        for group in filter(None, living):
            shared = len(group[0].prompt_token_ids) // self.block_size
            longest = len(group[0].prompt_token_ids) + group[0].max_tokens - 1
            free[group[0].worker] -= shared + len(group) * (-(-longest // self.block_size) - shared)
        assert self.scheduler.placement.blocks_free == free
        assert min(free) >= 0
        self._check_naive_blocks(step)

    def _check_naive_blocks(self, step: ScheduledStep) -> None:
        """What R-workers hold at the end of the step, prompt blocks of one family once, is within what is reserved."""
        tokens = {i: (held.worker, held.num_tokens) for i, held in self.held.items()}
        for chunk in (c for chunks in step.mini_batches for c in chunks):
            tokens[chunk.sequence_id] = (chunk.worker, chunk.context_len + len(chunk.token_ids))
        blocks: list[set[tuple[int, int]]] = [set() for _ in self.num_blocks]
        for sequence_id, (worker, count) in tokens.items():
            whole_prompt = len(self.members[sequence_id // 100][0].prompt_token_ids) // self.block_size
            for block in range(-(-count // self.block_size)):
                blocks[worker].add((sequence_id // 100 * 100 if block < whole_prompt else sequence_id, block))
        reserved = [n - f for n, f in zip(self.num_blocks, self.scheduler.placement.blocks_free, strict=True)]
        assert all(len(used) <= room for used, room in zip(blocks, reserved, strict=True))

    def _write(self, step: ScheduledStep) -> None:
        for chunk in (c for chunks in step.mini_batches for c in chunks):
            held = self.held.setdefault(chunk.sequence_id, Held(chunk.worker, 0))
            held.num_tokens += len(chunk.token_ids)

    def _take(self, step: ScheduledStep) -> None:
        """As ``LLMEngine._take``: fork, append a token each, end what is done."""
        for chunk in (c for chunks in step.mini_batches for c in chunks if c.samples):
            group = self.members[chunk.sequence_id // 100]
            parent = next(m for m in group if m.sequence_id == chunk.sequence_id)
            grown = [parent, *parent.siblings]
            self.scheduler.fork_siblings(parent)
            for member in grown:
                member.output_token_ids.append(7)
                if (
                    len(member.output_token_ids)
                    == self.jobs[member.sequence_id // 100].lengths[member.sequence_id % 100]
                ):
                    self._finish(member)

    def _finish(self, member: Sequence) -> None:
        self.alive.discard(member.sequence_id)
        self.scheduler.finish(member)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Small budgets of every kind, so that each is hit; every job fits the largest worker, as the engine checks."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_num_seqs = draw(st.integers(1, 8))
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        num_mini_batches=draw(st.integers(1, 4)),
        scratch_tokens=draw(st.sampled_from([0, 5, 30, 1000])),
    )
    jobs = []
    for _ in range(draw(st.integers(1, 12))):
        most = draw(st.integers(1, 8))
        n = draw(st.integers(1, min(4, max_num_seqs)))
        lengths = draw(st.lists(st.integers(1, most), min_size=n, max_size=n))
        aborts = draw(st.none() | st.integers(0, 12))
        jobs.append(Job(draw(st.integers(1, 40)), most, lengths, draw(st.integers(0, 8)), aborts))

    def need(job: Job) -> int:
        shared = job.prompt_len // block_size
        return shared + len(job.lengths) * (-(-(job.prompt_len + job.max_tokens - 1) // block_size) - shared)

    largest = max(map(need, jobs)) + draw(st.integers(0, 30))
    others = draw(st.lists(st.integers(1, largest), max_size=2))
    return Run(limits, [*others, largest], block_size, jobs)


@given(runs(), st.frozensets(st.integers(0, 20), max_size=3))
@settings(max_examples=300)
def test_every_promise_in_every_step(run: Run, fail_steps: frozenset[int]) -> None:
    run.to_the_end(fail_steps)


def scheduler_of(num_blocks: int = 100, seqs: int = 8, tokens: int = 64, scratch: int = 1000, k: int = 1) -> Scheduler:
    return Scheduler(Limits(seqs, tokens, k, scratch), Placement([num_blocks], 4))


def chunks_of(step: ScheduledStep) -> list[tuple[int, int, int]]:
    return [(c.sequence_id, c.context_len, len(c.token_ids)) for chunks in step.mini_batches for c in chunks]


def test_decodes_come_before_prompt_chunks_and_prompts_before_new_requests() -> None:
    scheduler = scheduler_of(tokens=10)
    first, second, third = (Sequence(i, list(range(length)), 4) for i, length in enumerate((6, 12, 3)))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    plans = []
    for _ in range(3):
        step = scheduler.schedule()
        plans.append(sorted(chunks_of(step)))
        scheduler.commit(step)
        for sequence in (first, second, third):
            if sequence.num_cached >= len(sequence.prompt_token_ids):
                sequence.output_token_ids.append(9)
    assert plans == [[(0, 0, 6), (1, 0, 4)], [(0, 6, 1), (1, 4, 8), (2, 0, 1)], [(0, 7, 1), (1, 12, 1), (2, 1, 2)]]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = scheduler_of(num_blocks=10)
    running, large, small = Sequence(0, [1] * 8, 13), Sequence(1, [1] * 30, 3), Sequence(2, [1], 2)
    for sequence in (running, large, small):
        scheduler.add(sequence)
    step = scheduler.schedule()
    scheduler.commit(step)
    assert chunks_of(step) == [(0, 0, 8)]
    running.output_token_ids.append(9)
    scheduler.finish(running)
    step = scheduler.schedule()
    assert sorted(chunks_of(step)) == [(1, 0, 30), (2, 0, 1)]
    assert step.controls == (((Verb.RELEASE, 0, 0, 0),),)


def test_a_reservation_counts_shared_prompt_blocks_once() -> None:
    placement = Placement([5, 20], 4)
    group = [Sequence(i, [0] * 10, 3) for i in range(3)]  # 2 whole prompt blocks, and one more for each of three
    group[0].siblings = tuple(group[1:])
    assert placement.blocks_for(group[0]) == 2 + 3 * 1
    assert placement.reserve(group[0])
    assert [member.worker for member in group] == [1, 1, 1]
    after = []
    for member in group:
        after.append(placement.blocks_free[1])
        placement.release(member)
    assert (after, placement.blocks_free) == ([15, 16, 17], [5, 20])
    assert not placement.reserve(Sequence(9, [0] * 90, 1))
    assert placement.blocks_free == [5, 20]


def test_the_last_token_is_never_cached() -> None:
    assert Placement([10], 4).blocks_for(Sequence(0, [0] * 4, 1)) == 1
    assert Placement([10], 4).blocks_for(Sequence(0, [0] * 4, 2)) == 2


def test_unborn_siblings_take_places() -> None:
    scheduler = scheduler_of(seqs=4)
    parent = Sequence(0, [0] * 8, 5)
    parent.siblings = (Sequence(1, [0] * 8, 5), Sequence(2, [0] * 8, 5))
    for sequence in (parent, Sequence(3, [0] * 8, 5), Sequence(4, [0] * 8, 5)):
        scheduler.add(sequence)
    assert [row[0] for row in chunks_of(scheduler.schedule())] == [0, 3]


def test_forks_are_ordered_before_the_release_of_their_source() -> None:
    scheduler = scheduler_of()
    parent, sibling = Sequence(0, [0] * 6, 5), Sequence(1, [0] * 6, 5)
    parent.siblings = (sibling,)
    scheduler.add(parent)
    scheduler.commit(scheduler.schedule())
    scheduler.fork_siblings(parent)
    scheduler.finish(parent)
    sibling.output_token_ids.append(9)
    step = scheduler.schedule()
    assert step.controls == (((Verb.FORK, 1, 0, 6), (Verb.RELEASE, 0, 0, 0)),)
    assert chunks_of(step) == [(1, 6, 1)]
    assert scheduler.schedule().controls == ((),)


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_with_unborn_siblings_can_be_aborted(begun: bool) -> None:
    scheduler = scheduler_of(tokens=8)
    parent, sibling = Sequence(0, [0] * 20, 5), Sequence(1, [0] * 20, 5)
    parent.siblings = (sibling,)
    scheduler.add(parent)
    if begun:
        scheduler.commit(scheduler.schedule())
    for sequence in (parent, sibling):
        scheduler.finish(sequence)
    assert scheduler.schedule().controls == (((Verb.RELEASE, 0, 0, 0),) if begun else (),)
    assert scheduler.placement.blocks_free == [100]
    assert not scheduler.has_unfinished


def test_prompts_that_do_not_fit_the_scratch_attend_on_the_r_worker() -> None:
    scheduler = scheduler_of(scratch=20)
    for i, length in enumerate((12, 12, 8)):
        scheduler.add(Sequence(i, [0] * length, 2))
    (chunks,) = scheduler.schedule().mini_batches
    assert [(chunk.sequence_id, chunk.attends) for chunk in chunks] == [(1, True), (0, False), (2, False)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000), st.just(1) | st.integers(2, 60)), max_size=60),
    st.integers(1, 4),
)
def test_mini_batches_are_balanced(rows: list[tuple[int, int, int]], k: int) -> None:
    chunks = [
        Chunk(i, worker, context, (0,) * count, attends=count == 1 or i % 2 == 0)
        for i, (worker, context, count) in enumerate(rows)
    ]
    dealt = deal(chunks, k)
    assert sorted(chunk.sequence_id for part in dealt for chunk in part) == list(range(len(rows)))
    singles = [[chunk for chunk in part if len(chunk.token_ids) == 1] for part in dealt]
    counts = [len(part) for part in singles]
    assert max(counts) - min(counts) <= 1
    for worker in range(3):
        loads = [sum(chunk.context_len for chunk in part if chunk.worker == worker) for part in singles]
        longest = max((chunk.context_len for part in singles for chunk in part if chunk.worker == worker), default=0)
        assert max(loads) - min(loads) <= 2 * longest
    totals = [sum(len(chunk.token_ids) for chunk in part) for part in dealt]
    assert max(totals) - min(totals) <= max((len(chunk.token_ids) for chunk in chunks), default=0)


def test_equal_workers_get_equal_loads() -> None:
    chunks = [Chunk(i, 0, context, (0,)) for i, context in enumerate((10, 20, 30, 40))]
    assert [[chunk.context_len for chunk in part] for part in deal(chunks, 2)] == [[40, 10], [30, 20]]


def test_step_plan() -> None:
    """Every worker lists every mini-batch; spans are the chunks in order, controls verbatim."""
    decode, prompt = Chunk(5, 0, 40, (9,)), Chunk(6, 1, 8, (1, 2, 3), attends=False, samples=False, is_decode=False)
    remote = Chunk(7, 1, 0, (4, 5), is_decode=False)
    step = ScheduledStep(((decode, remote, prompt), ()), (((Verb.FORK, 8, 5, 40),), ()))
    assert (step.num_tokens, step.kv_load, step.is_decode) == (6, 41 + 2 + 11, False)
    assert ScheduledStep(((decode,),), ((),)).is_decode
    plan = step.to_step_plan()
    first, second = plan.workers
    assert first.controls.dtype == CONTROL and first.controls.tolist() == [(0, 8, 5, 40)]
    assert second.controls.dtype == CONTROL and len(second.controls) == 0
    assert [spans.dtype for worker in plan.workers for spans in worker.mini_batches] == [SPAN] * 4
    assert [spans.tolist() for spans in first.mini_batches] == [[(5, 40, 1, 1)], []]
    assert [spans.tolist() for spans in second.mini_batches] == [[(7, 0, 2, 1), (6, 8, 3, 0)], []]
    assert all(isinstance(spans, np.ndarray) for worker in plan.workers for spans in worker.mini_batches)
