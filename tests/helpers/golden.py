"""Seeded runs of a scheduler with all features mixed, through its public methods alone, and a digest of each.

A run draws its limits, requests and events from one seed. R-workers are lost between and within steps, join and drain.
Prompts of prefill workers arrive late or fail. Drafts are right or wrong; requests are aborted; steps fail. The digest
covers the bytes of every plan, as R-workers get them, and the tokens of every sequence. It does not judge them: a
change that should not change decisions keeps all digests.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdecode.cluster.wire.payload import encode_plan
from fastdecode.core.errors import RequestError
from fastdecode.core.placing import UNLIMITED, Placing
from fastdecode.core.remote_prefill import PrefillPart, RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler, Sequence
from helpers.drafting import AlwaysMost

MOST_STEPS = 600
MODES = ["one copy"] * 4 + ["ranges"] * 3 + ["two copies"] * 3
"""How caches are placed, drawn for each seed. The traces have no runs with both ranges and two copies."""


EVENT_RATES = {"lose": 0.04, "lose within": 0.04, "join": 0.06, "drain": 0.05, "abort": 0.05, "fail": 0.04} | {
    "fail prompt": 0.2,
    "reset": 0.02,
}
"""Rate of each event, per step or per computed prompt, in runs with such events."""


class SomePrompts:
    """A ``PrefillPolicy`` that sends about half of the prompts of at least ``least`` tokens to prefill workers."""

    def __init__(self, least: int) -> None:
        self._least, self._count = least, 0

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        self._count = num_waiting + num_decoding

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        if num_tokens < self._least or (num_tokens + self._count) % 3 == 0:
            return ()
        middle, end = context_len + num_tokens // 2, context_len + num_tokens
        return (PrefillPart(0, context_len, middle), PrefillPart(1, middle, end))

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        pass

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        pass

    def joined(self, worker: int) -> None:
        pass

    def lost(self, worker: int) -> None:
        pass


@dataclass
class GoldenRun:
    """The run of one seed. ``mode``: one of MODES to use instead of a drawn one."""

    seed: int
    mode: str | None = None
    scheduler: Scheduler = field(init=False)
    num_steps: int = field(default=0, init=False)
    events: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._rng = rng = random.Random(self.seed)
        mode = self.mode or rng.choice(MODES)
        names = [name for name in SCHEDULES if mode == "one copy" or not SCHEDULES[name].reserves_longest]
        self._schedule = rng.choice([*names, "sls", "stall-free"])
        self._digest = hashlib.blake2b(digest_size=8)
        self._alive: dict[int, Sequence] = {}
        self._outputs: dict[int, int] = {}
        self._jobs: list[tuple[int, RemotePrefill]] = []
        self._requests = self._draw_requests(rng)
        limits = self._draw_limits(rng, mode)
        policy = SomePrompts(rng.choice([2, 8])) if rng.random() < 0.5 else None
        drafts = AlwaysMost() if limits.num_speculative_tokens else None
        self.scheduler = Scheduler(SCHEDULES[self._schedule], limits, policy, drafts)
        self._has_times = rng.random() < 0.6
        self._rates = {kind: rng.choice([0.0, 0.0, rate]) for kind, rate in EVENT_RATES.items()}

    def _draw_requests(self, rng: random.Random) -> list[tuple[int, list[Sequence]]]:
        """Return the arrival step and the sequences of each request; prompts share the beginnings of two families."""
        requests = []
        for number in range(rng.randint(2, 14)):
            length, family = rng.randint(1, 60), rng.randrange(2)
            shared = rng.randint(0, length)
            prompt = [1000 * family + i for i in range(shared)]
            prompt += [rng.randrange(5000, 5003) for _ in range(length - shared)]
            most, n = rng.randint(1, 30), rng.choice([1, 1, 1, 2, 3])
            members = [Sequence(100 * number + i, list(prompt), most) for i in range(n)]
            for member in members:
                self._outputs[member.sequence_id] = rng.randint(1, most)
                member.may_stop = self._outputs[member.sequence_id] < most
            members[0].siblings = tuple(members[1:])
            requests.append((rng.randint(0, 12), members))
        return requests

    def _draw_limits(self, rng: random.Random, mode: str) -> Limits:
        block_size = rng.choice([1, 2, 4, 16])
        groups = [group for _, group in self._requests]
        longest = max(len(group[0].prompt_token_ids) + group[0].max_tokens for group in groups)
        most = max(map(len, groups))
        need = -(-longest // block_size) + most
        if SCHEDULES[self._schedule].reserves_longest:
            need = -(-longest // block_size) * most
        num_workers = rng.randint(2, 4)
        num_blocks = [rng.randint(max(1, need // 2), need + 40) for _ in range(num_workers - 1)] + [
            need + rng.randrange(40)
        ]
        bandwidths = [rng.choice([1.0, 2.0]) for _ in num_blocks]
        limit = rng.choice([None, None, 8 * most * longest + rng.randrange(400)])
        max_num_seqs = rng.randint(most, 10)
        return Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.randint(0, 40),
            num_mini_batches=rng.randint(1, 3),
            scratch_tokens=rng.choice([0, 5, 40, 1000]),
            max_model_len=longest + 1,
            block_size=block_size,
            num_blocks=tuple(num_blocks),
            bandwidths=tuple(bandwidths),
            kv_load_limit=limit,
            micro_batch_interval=rng.choice([None, 1, 3]),
            prefix_caching=rng.random() < 0.6,
            balanced_kv_tokens=rng.choice([None, None, 100]),
            seconds_per_moved_token=rng.choice([0.0, 0.001]),
            num_speculative_tokens=rng.choice([0, 0, 1, 4]),
            placing=Placing(
                rng.choice([2, 4, 8]) * block_size if mode in ("ranges", "both") else UNLIMITED,
                2 if mode in ("two copies", "both") else 1,
            ),
            hosts=tuple(rng.choice("ab") for _ in num_blocks),
        )

    def digest(self) -> str:
        """Run to the end; return the digest, 16 hexadecimal digits."""
        last = max(arrival for arrival, _ in self._requests)
        while self.num_steps <= last or self._alive:
            self._arrive()
            self._between_steps()
            if self._alive:
                self._step()
            self.num_steps += 1
            if self.num_steps > MOST_STEPS:
                self._note("starves", sorted(self._alive))
                break
        for _, group in self._requests:
            for member in group:
                self._note("tokens", (member.sequence_id, list(member.output_token_ids)))
        names = "prefix_queries", "prefix_hit_tokens", "preemptions", "drafts"
        counts = ", ".join(f"{name}={getattr(self.scheduler.statistics, name)}" for name in names)
        self._note("statistics", f"SchedulerStatistics({counts})")
        return self._digest.hexdigest()

    def _note(self, what: str, value: Any = "") -> None:
        self._digest.update(f"{what} {value};".encode())

    def _happens(self, kind: str) -> bool:
        happens = self._rng.random() < self._rates[kind]
        if happens:
            self.events.append(f"{kind} in step {self.num_steps}")
            self._note(kind)
        return happens

    def _arrive(self) -> None:
        for arrival, group in self._requests:
            if arrival == self.num_steps:
                try:
                    self.scheduler.add(group[0])
                except RequestError as error:
                    self._note("refused", error)
                    continue
                self._alive |= {member.sequence_id: member for member in group}
        if self._alive and self._happens("abort"):
            chosen = self._rng.choice(sorted(self._alive))
            for member in [each for each in self._alive.values() if each.sequence_id // 100 == chosen // 100]:
                self._finish(member, "abort")

    def _between_steps(self) -> None:
        present = self.scheduler.snapshot().present
        if self._happens("lose") and len(present) > 1:
            self._tell()
            self._lose([self._rng.choice(present)], [])
        if self._happens("join") and len(present) < 6:
            vacant = self.scheduler.store.workers.vacant
            self.scheduler.members.join(
                self._rng.randint(4, 80), self._rng.choice([1.0, 2.0]), vacant[0] if vacant else None, "b"
            )
        if self._happens("drain") and len(self.scheduler.snapshot().accepting) > 1:
            self.scheduler.members.drain(self._rng.choice(self.scheduler.snapshot().accepting))
        if self._happens("reset"):
            self.scheduler.store.prefixes.reset()
        self._move()
        for worker in self.scheduler.members.drained():
            self._note("drained", worker)
            self._tell()
            self._lose([worker], [])
        self._hear_of_prompts()

    def _move(self) -> None:
        for _ in range(2):
            move = self.scheduler.transfers.begin_next()
            if move is None:
                return
            self._tell()
            self._note("move", (move.sequence.sequence_id, move.cache_id, move.source, move.target, move.num_copied))
            self._note("tokens", move.num_tokens)
            self.scheduler.transfers.done(move, 1e-5 * move.num_tokens)

    def _hear_of_prompts(self) -> None:
        due = [each for when, each in self._jobs if when <= self.num_steps]
        self._jobs = [(when, each) for when, each in self._jobs if when > self.num_steps]
        for prefill in due:
            if self._happens("fail prompt"):
                self.scheduler.prefill_failed(prefill.job_id, float(self.num_steps))
            else:
                self._note("prefilled", self.scheduler.prefilled(prefill.job_id, float(self.num_steps)))

    def _step(self) -> None:
        wanted = self.scheduler.drafts.grant()
        self.scheduler.drafts.propose({each: self._draft(each, count) for each, count in wanted.items()})
        step = self.scheduler.schedule(float(self.num_steps))
        self._note_plan(step)
        if not step.prefills and not step.arrived and self._happens("fail"):
            return  # R-workers received its controls; its rows are dropped
        for prefill in step.prefills:
            self._note("prefill", (prefill.job_id, prefill.sequence_id, prefill.stores[0].r_worker, prefill.parts))
            self._jobs.append((self.num_steps + self._rng.randint(1, 6), prefill))
        sampled = [i for mini_batch in step.mini_batches for i in mini_batch.sampled_ids]
        accepted = {each: self._num_accepted(each, tokens) for each, tokens in step.drafts.items()}
        self.scheduler.commit(step, accepted)
        taken = dict.fromkeys((*sampled, *step.arrived), 1) | {each: 1 + count for each, count in accepted.items()}
        present = self.scheduler.snapshot().present
        if self._happens("lose within") and len(present) > 1:
            self._lose([self._rng.choice(present)], taken)
        for sequence_id, count in taken.items():
            self._take(sequence_id, count)
        if self._has_times and step.num_tokens:
            busy = [0.001 * (1 + (i % 2)) * load for i, load in enumerate(step.kv_loads)]
            self.scheduler.observe(step, 0.05, max(busy), busy)

    def _note_plan(self, step: ScheduledStep) -> None:
        for part in step.to_step_plan().workers:
            self._digest.update(encode_plan(part))
        for mini_batch in step.mini_batches:
            self._digest.update(np.ascontiguousarray(mini_batch.token_ids, "<i8").tobytes())
        self._note("step", (step.num_starts, step.arrived, step.kv_loads))

    def _tell(self) -> None:
        self._note_plan(self.scheduler.controls_alone())

    def _lose(self, workers: list[int], taken: Any) -> None:
        spoilt = self.scheduler.members.spoilt(workers)
        self._note("lost", (workers, sorted(spoilt)))
        for sequence_id in spoilt:
            if taken:
                taken.pop(sequence_id, None)
        for worker in workers:
            for parent in self.scheduler.members.lost(worker):
                for member in (parent, *parent.siblings):
                    self._finish(member, "error")

    def _token(self, sequence_id: int, place: int) -> int:
        return 10 + (sequence_id // 100 * 31 + sequence_id % 100 * 17 + place * 7) % 97

    def _draft(self, sequence_id: int, count: int) -> list[int]:
        done = len(self._alive[sequence_id].output_token_ids)
        right = [self._token(sequence_id, done + i) for i in range(self._rng.randint(0, count))]
        return [token if self._rng.random() < 0.7 else 1 for token in right]

    def _num_accepted(self, sequence_id: int, drafts: list[int]) -> int:
        done = len(self._alive[sequence_id].output_token_ids)
        right = [token == self._token(sequence_id, done + i) for i, token in enumerate(drafts)]
        return [*right, False].index(False)

    def _take(self, sequence_id: int, count: int) -> None:
        parent = self._alive.get(sequence_id)
        if parent is None:
            return
        grown = [parent, *parent.siblings]
        self.scheduler.store.fork_siblings(parent)
        for member in grown:
            for _ in range(count):
                if member.sequence_id not in self._alive:
                    break
                member.append(self._token(member.sequence_id, len(member.output_token_ids)))
                if len(member.output_token_ids) == self._outputs[member.sequence_id]:
                    cut = len(member.output_token_ids) == member.max_tokens
                    self._finish(member, "length" if cut else "stop")

    def _finish(self, member: Sequence, reason: str) -> None:
        if self._alive.pop(member.sequence_id, None):
            self.scheduler.finish(member, reason)
