"""Drives a scheduler as the engine does, over naive R-workers, and recounts from scratch what every step promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from fastdecode.scheduler import POLICIES, Limits, Scheduler, Sequence
from fastdecode.scheduler.policy import Prompts
from fastdecode.step import Chunk, ScheduledStep
from fastdecode.types import Verb

OUTPUT_TOKEN = 7

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
    """A request as a user brings it: ``lengths`` holds the output tokens each of its samples will really have."""

    prompt: list[int]
    max_tokens: int
    lengths: list[int]
    arrives: int = 0
    aborts: int | None = None


@dataclass
class Held:
    """What a naive R-worker knows of a sequence: its tokens, and the physical blocks they lie in."""

    worker: int
    tokens: list[int]
    blocks: list[object]


@dataclass(frozen=True)
class Join:
    """An R-worker that joins a run."""

    num_blocks: int
    bandwidth: float


@dataclass(frozen=True)
class Drain:
    """An R-worker, by its number, that is to leave a run."""

    worker: int


@dataclass
class Run:
    """One workload through one scheduler; without ``recounts`` only loads and starts are noted, for long runs.

    ``seconds_per_token``: what the scheduler is told that each R-worker was busy; none: it is told nothing.
    """

    policy: str
    limits: Limits
    jobs: list[Job]
    recounts: bool = True
    seconds_per_token: tuple[float, ...] = ()
    step_number: int = field(default=0, init=False, repr=False)
    members: list[list[Sequence]] = field(default_factory=list, init=False, repr=False)
    alive: dict[int, Sequence] = field(default_factory=dict, init=False, repr=False)
    held: dict[int, Held] = field(default_factory=dict, init=False, repr=False)
    left_behind: dict[tuple[int, int], Held] = field(default_factory=dict, init=False, repr=False)
    num_moves: int = field(default=0, init=False, repr=False)
    kv_loads: list[list[int]] = field(default_factory=list, init=False, repr=False)
    starts: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    has_preempted: bool = field(default=False, init=False, repr=False)
    _started: set[int] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(POLICIES[self.policy], self.limits)
        for number, job in enumerate(self.jobs):
            group = [Sequence(100 * number + i, job.prompt, job.max_tokens) for i in range(len(job.lengths))]
            group[0].siblings = tuple(group[1:])
            self.members.append(group)

    def to_the_end(
        self,
        fail_steps: frozenset[int] = frozenset(),
        losses: dict[int, int] | None = None,
        changes: dict[int, Join | Drain] | None = None,
        moves_per_step: int = 0,
    ) -> None:
        """Every job arrives, is aborted or ends; then nothing is left anywhere.

        ``losses``: step → lost worker; ``changes``: step → who joins or drains then.
        """
        while self.step_number <= max(job.arrives for job in self.jobs) or self.alive:
            self.arrive_and_abort()
            if self.alive:
                self.step(fails=self.step_number in fail_steps)
                if losses and self.step_number in losses:
                    self.lose(losses[self.step_number])
            self._change((changes or {}).get(self.step_number))
            self.move(moves_per_step)
            self.step_number += 1
            assert self.step_number < 5000, "the scheduler starves somebody"
        if self.recounts:
            self._check_end()

    def _check_end(self) -> None:
        self._apply(self.scheduler.schedule())
        ledger = self.scheduler.ledger
        assert set(self.held) == {i for i in self.held if i < 0} and len(self.held) == len(self.scheduler.prefix_cache)
        assert self._blocks_used() == [n - free for n, free in zip(ledger.num_blocks, ledger.free, strict=True)]
        assert sum(self._blocks_used()) == sum(ledger.cached)
        self.scheduler.reset_prefix_cache()
        self._apply(self.scheduler.schedule())
        assert self.held == {} and ledger.free == ledger.num_blocks and not any(ledger.cached)
        assert not self.left_behind and not self.scheduler.has_unfinished and not self.scheduler.has_controls
        assert self.scheduler.residents.scratch_free == self.limits.scratch_tokens
        assert self.scheduler.prefix_cache._computing == {} and self.scheduler.queue._following == {}

    def step(self, fails: bool = False) -> ScheduledStep:
        """One step, checked."""
        num_preemptions = self.scheduler.num_preemptions
        step = self.scheduler.schedule()
        self.has_preempted = self.scheduler.num_preemptions > num_preemptions
        chunks = [chunk for mini_batch in step.mini_batches for chunk in mini_batch]
        assert chunks, "nothing runs although somebody waits"
        self.kv_loads.append(step.kv_loads)
        self.starts += [(self.step_number, i) for i in (c.sequence_id for c in chunks) if i not in self._started]
        self._started |= {chunk.sequence_id for chunk in chunks}
        if self.recounts:
            self._recount(step, chunks)
        if fails:
            self._unwrite(chunks)
        else:
            self.scheduler.commit(step)
            self._take(chunks)
            self._observe(step)
        return step

    def _observe(self, step: ScheduledStep) -> None:
        """R-workers that have joined are as fast as the first."""
        if self.seconds_per_token:
            per_token = np.full(len(step.kv_loads), self.seconds_per_token[0])
            per_token[: len(self.seconds_per_token)] = self.seconds_per_token
            busy = per_token * step.kv_loads
            self.scheduler.observe(step, 0.0, float(busy.max()), busy.tolist())

    def _recount(self, step: ScheduledStep, chunks: list[Chunk]) -> None:
        self._apply(step)
        self._check_order(step)
        for chunk in chunks:
            self._check_chunk(chunk)
        self._check_budgets(step, chunks)
        self._check_nobody_waits_in_vain(step)
        self._write(chunks)
        self._check_blocks()

    def arrive_and_abort(self) -> None:
        """What happens between steps."""
        for job, group in zip(self.jobs, self.members, strict=True):
            if job.arrives == self.step_number:
                self.scheduler.add(group[0])
                self.alive |= {member.sequence_id: member for member in group}
            if job.aborts == self.step_number and job.arrives <= self.step_number:
                for member in group:
                    self._finish(member, "abort")

    def lose(self, worker: int) -> list[Sequence]:
        """An R-worker goes with all it held; returns the requests that no other could hold, which end."""
        self.held = {i: held for i, held in self.held.items() if held.worker != worker}
        self.left_behind = {at: held for at, held in self.left_behind.items() if at[0] != worker}
        hopeless = self.scheduler.lost(worker)
        for parent in hopeless:
            for member in (parent, *parent.siblings):
                self._finish(member, "error")
        return hopeless

    def _change(self, change: Join | Drain | None) -> None:
        if isinstance(change, Join):
            self.scheduler.join(change.num_blocks, change.bandwidth)
        elif change:
            self.scheduler.drain(change.worker)

    def move(self, most: int) -> None:
        """At most so many sequences go to other R-workers; those that have nothing to do any more go away."""
        for _ in range(most):
            move = self.scheduler.next_move()
            if move is None:
                break
            self._apply(self.scheduler.controls_alone())
            sequence_id, source = move.sequence.sequence_id, move.sequence.worker
            held, block_size = self.held[sequence_id], self.limits.block_size
            assert held.worker == source != move.target and move.target in self.scheduler.fleet.accepting
            assert len(held.tokens) == move.num_tokens
            blocks = [object() for _ in range(-(-move.num_tokens // block_size))]
            assert self._blocks_used()[move.target] + len(blocks) <= self.scheduler.ledger.num_blocks[move.target]
            self.left_behind[source, sequence_id] = held
            self.held[sequence_id] = Held(move.target, list(held.tokens), blocks)
            self.scheduler.moved(move, 0.0)
            self.num_moves += 1
        for worker in self.scheduler.drained():
            self._apply(self.scheduler.controls_alone())
            assert all(held.worker != worker for i, held in self.held.items() if i >= 0)
            assert not self.lose(worker)

    def _apply(self, step: ScheduledStep) -> None:
        """The controls, in order, on naive R-workers that share full blocks and copy a partial one.

        Each has its own: a sequence may leave one and begin anew on another in the same step.
        """
        parts = [{i: held for i, held in self.held.items() if held.worker == w} for w in range(len(step.controls))]
        for worker, verbs in enumerate(step.controls):
            for verb, sequence_id, source_id, num_tokens in verbs:
                self._obey(worker, parts[worker], Verb(verb), sequence_id, source_id, num_tokens)
        self.held = {i: held for part in parts for i, held in part.items()}
        assert len(self.held) == sum(map(len, parts)), "a sequence is on two R-workers"

    def _obey(
        self, worker: int, part: dict[int, Held], verb: Verb, sequence_id: int, source_id: int, num_tokens: int
    ) -> None:
        """One control, on what ``worker`` holds."""
        full, rest = divmod(num_tokens, self.limits.block_size)
        if verb == Verb.FORK:
            source = part[source_id]  # a KeyError here: released before it was forked
            assert len(source.tokens) >= num_tokens and sequence_id not in part
            part[sequence_id] = Held(worker, source.tokens[:num_tokens], source.blocks[:full] + [object()] * (rest > 0))
        elif verb == Verb.TRUNCATE:
            assert rest == 0
            del part[sequence_id].tokens[num_tokens:], part[sequence_id].blocks[full:]
        else:
            assert verb == Verb.RELEASE
            if not self.left_behind.pop((worker, sequence_id), None):
                del part[sequence_id]

    def _check_order(self, step: ScheduledStep) -> None:
        ids = [chunk.sequence_id for mini_batch in step.mini_batches for chunk in mini_batch]
        assert max(Counter(ids).values(), default=1) == 1, "a sequence is in two chunks"
        for mini_batch in step.mini_batches:
            order = [(chunk.worker, not chunk.attends) for chunk in mini_batch]
            assert order == sorted(order)

    def _check_chunk(self, chunk: Chunk) -> None:
        """Right tokens after the right tokens: whatever was forked, retained or recomputed."""
        member = self.alive[chunk.sequence_id]
        held = self.held.get(chunk.sequence_id, Held(chunk.worker, [], []))
        tokens = [*member.prompt_token_ids, *member.output_token_ids]
        end = chunk.context_len + len(chunk.token_ids)
        assert (held.worker, held.tokens) == (chunk.worker, tokens[: chunk.context_len])
        assert list(chunk.token_ids) == tokens[chunk.context_len : end] and len(chunk.token_ids) > 0
        if chunk.is_decode:
            assert len(chunk.token_ids) == 1 and chunk.attends and chunk.samples and end == len(tokens)
            assert member.output_token_ids
        else:
            assert chunk.samples == chunk.last_of_prompt == (end == len(tokens))

    def _check_budgets(self, step: ScheduledStep, chunks: list[Chunk]) -> None:
        """Tokens, sequences, KV load and scratch, each counted anew; and nobody who decodes is held up unduly."""
        prompts = POLICIES[self.policy].prompts
        if prompts is not Prompts.UNBOUNDED:
            assert step.num_tokens <= self.limits.max_num_batched_tokens
        assert len(self.scheduler.residents) <= self.limits.max_num_seqs
        decoding = {i for i in self.held if i >= 0 and self._decodes(self.alive[i])}
        decoded = {chunk.sequence_id for chunk in chunks if chunk.is_decode}
        if prompts is Prompts.FIRST and len(decoded) < len(chunks):
            assert not decoded
        elif self.limits.kv_load_limit is None or self.policy != "sls":
            assert decoded == decoding
        else:
            total = sum(self.limits.bandwidths)
            for load, bandwidth in zip(step.kv_loads, self.scheduler.fleet.bandwidths, strict=True):
                assert load <= self.limits.kv_load_limit * bandwidth / total
        in_scratch = {c.sequence_id for c in chunks if not c.attends}
        assert sum(self.alive[i].num_prefill for i in in_scratch) <= self.limits.scratch_tokens

    def _check_nobody_waits_in_vain(self, step: ScheduledStep) -> None:
        """The oldest waits for a seat, for rows of the step, or for blocks; or the policy spreads starts."""
        head, policy = next(iter(self.scheduler.queue), None), POLICIES[self.policy]
        if head is None or policy.stabilizes_load or policy.waves or self.limits.prefix_caching:
            return
        if policy.prompts is Prompts.FIRST and self.has_preempted:
            return  # its blocks came free after the prompts were looked at
        members, ledger = 1 + len(head.siblings), self.scheduler.ledger
        partial = head.num_tokens % self.limits.block_size
        rows_left = self.limits.max_num_batched_tokens - step.num_tokens
        no_rows = rows_left < 1 if policy.prompts is Prompts.CHUNKED else rows_left < head.num_tokens
        needed = ledger.blocks_for(head.num_tokens) + (members - 1) * (partial > 0)
        if policy.reserves_longest:
            needed = members * ledger.blocks_for(self.limits.max_model_len)
        waits_for_blocks = all(
            ledger.blocks_for(head.max_cached) > ledger.num_blocks[worker]
            or needed + (0 if policy.reserves_longest else len(self.scheduler.residents.on(worker))) > free
            for worker, free in enumerate(ledger.free)
        )
        no_seat = len(self.scheduler.residents) + members > self.limits.max_num_seqs
        decodes_wait = policy.prompts is Prompts.FIRST and step.is_decode
        assert no_seat or waits_for_blocks or (no_rows and policy.prompts is not Prompts.UNBOUNDED and not decodes_wait)

    def _decodes(self, member: Sequence) -> bool:
        """It has output, and does not compute its cache again after a preemption."""
        return bool(member.output_token_ids) and member.sequence_id not in self.scheduler.residents.prompts

    def _check_blocks(self) -> None:
        """What R-workers hold at the end of the step is there, and within what the scheduler counts."""
        ledger = self.scheduler.ledger
        for used, free, capacity in zip(self._blocks_used(), ledger.free, ledger.num_blocks, strict=True):
            assert used <= capacity - free <= capacity

    def _blocks_used(self) -> list[int]:
        blocks: list[set[int]] = [set() for _ in self.scheduler.ledger.num_blocks]
        for held in (*self.held.values(), *self.left_behind.values()):
            blocks[held.worker] |= {id(block) for block in held.blocks}
        return [len(used) for used in blocks]

    def _write(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            held = self.held.setdefault(chunk.sequence_id, Held(chunk.worker, [], []))
            held.tokens += chunk.token_ids
            missing = -(-len(held.tokens) // self.limits.block_size) - len(held.blocks)
            held.blocks += [object() for _ in range(missing)]

    def _unwrite(self, chunks: list[Chunk]) -> None:
        """The step was abandoned."""
        for chunk in chunks:
            held = self.held[chunk.sequence_id]
            del held.tokens[chunk.context_len :]
            del held.blocks[-(-chunk.context_len // self.limits.block_size) :]
            if not held.tokens:
                del self.held[chunk.sequence_id]

    def _take(self, chunks: list[Chunk]) -> None:
        """As ``LLMEngine._take``: fork, append a token each, end what is done."""
        for chunk in chunks:
            if not chunk.samples:
                continue
            parent = self.alive[chunk.sequence_id]
            grown = [parent, *parent.siblings]
            self.scheduler.fork_siblings(parent)
            for member in grown:
                member.append(OUTPUT_TOKEN)
                number, index = divmod(member.sequence_id, 100)
                if len(member.output_token_ids) == self.jobs[number].lengths[index]:
                    cut = len(member.output_token_ids) == member.max_tokens
                    self._finish(member, "length" if cut else "stop")

    def _finish(self, member: Sequence, reason: str) -> None:
        if self.alive.pop(member.sequence_id, None):
            self.scheduler.finish(member, reason)
