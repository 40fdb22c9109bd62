"""Prompts that prefill workers compute, as the scheduler sees them, without engine, workers or clock."""

from __future__ import annotations

from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from helpers.scheduler_harness import AMPLE, Job, Run

from fastdecode.core.placing import Placing
from fastdecode.core.remote_prefill import PrefillPart, RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import Verb
from fastdecode.scheduler import SCHEDULES, Scheduler, Sequence

LEAST = 64


@dataclass
class TwoWorkers:
    """A policy that sends prompts of LEAST tokens or more to two workers in halves, and notes its ``calls``."""

    calls: list[tuple] = field(default_factory=list)

    def begin_step(self, now_seconds: float, num_waiting: int, num_decoding: int) -> None:
        self.calls.append(("step", num_waiting, num_decoding))

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        start, middle, end = context_len, context_len + num_tokens // 2, context_len + num_tokens
        return (PrefillPart(0, start, middle), PrefillPart(1, middle, end)) if num_tokens >= LEAST else ()

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        self.calls.append(("started", job_id))

    def ended(self, job_id: int, now_seconds: float, computed: bool) -> None:
        self.calls.append(("ended", job_id, computed))

    def joined(self, worker: int) -> None: ...

    def lost(self, worker: int) -> None: ...


def make(num_blocks: PySequence[int] = (100,), **limits: Any) -> Scheduler:
    bandwidths = (1.0,) * len(num_blocks)
    settings = replace(AMPLE, num_blocks=tuple(num_blocks), bandwidths=bandwidths, prefix_caching=True, **limits)
    return Scheduler(SCHEDULES["stall-free"], settings, TwoWorkers())


def step(scheduler: Scheduler) -> ScheduledStep:
    """Schedule and commit a step; every sampled sequence gets a token."""
    planned = scheduler.schedule()
    scheduler.commit(planned)
    running = {**scheduler.store.residents.prompts, **scheduler.store.residents.decoding}
    for each in (*planned.arrived, *(i for part in planned.mini_batches for i in part.sampled_ids)):
        running[each].append(7)
    return planned


def verbs(planned: ScheduledStep) -> list[tuple[str, int, int, int]]:
    return [(Verb(verb).name, *rest) for worker in planned.controls for verb, *rest in worker]


def test_a_long_prompt_goes_to_prefill_workers_and_comes_back() -> None:
    scheduler = make()
    long, short = Sequence(1, list(range(100)), 10), Sequence(2, [1, 2, 3], 10)
    for each in (long, short):
        scheduler.add(each)
    first = step(scheduler)
    (prefill,) = first.prefills
    assert (prefill.sequence_id, prefill.stores[0].r_worker, prefill.token_ids) == (1, 0, tuple(range(100)))
    assert [(part.worker, part.start, part.end) for part in prefill.parts] == [(0, 0, 50), (1, 50, 100)]
    assert verbs(first) == [("RESERVE", 1, prefill.job_id, 100)]
    assert first.mini_batches[0].chunks["sequence_id"].tolist() == [2]  # The S-worker computes the short prompt.
    assert step(scheduler).prefills == ()
    assert scheduler.prefilled(prefill.job_id)
    third = step(scheduler)
    assert third.arrived == (1,)
    assert verbs(third) == [("COMMIT", 1, prefill.job_id, 100)]
    assert long.num_cached == 100
    fourth = step(scheduler)
    chunk = fourth.mini_batches[0].chunks
    assert chunk[chunk["sequence_id"] == 1]["context_len"].tolist() == [100]
    assert not len(scheduler.remote_prompts)


def test_its_tokens_take_no_part_in_the_step_budget() -> None:
    scheduler = make(max_num_batched_tokens=16, max_num_seqs=16)
    for number in range(4):
        scheduler.add(Sequence(number, list(range(number, number + 100)), 10))
    planned = step(scheduler)
    assert len(planned.prefills) == 4
    assert planned.num_tokens == 0


def test_a_failed_prompt_is_queued_again_and_its_reservation_released() -> None:
    scheduler = make()
    scheduler.add(Sequence(1, list(range(100)), 10))
    (prefill,) = step(scheduler).prefills
    free = scheduler.snapshot().r_workers[0].free
    scheduler.prefill_failed(prefill.job_id)
    again = step(scheduler)
    assert verbs(again)[0] == ("RELEASE", 1, 0, 0)
    (second,) = again.prefills
    assert second.job_id != prefill.job_id
    assert scheduler.snapshot().r_workers[0].free == free
    assert not scheduler.prefilled(prefill.job_id)  # The answer to the first attempt comes too late.
    assert scheduler.prefilled(second.job_id)
    assert step(scheduler).arrived == (1,)


@pytest.mark.parametrize("when", ["under way", "computed"])
def test_an_aborted_prompt_is_forgotten(when: str) -> None:
    scheduler = make()
    sequence = Sequence(1, list(range(100)), 10)
    scheduler.add(sequence)
    (prefill,) = step(scheduler).prefills
    if when == "computed":
        scheduler.prefilled(prefill.job_id)
    scheduler.finish(sequence)
    assert prefill.job_id not in scheduler.remote_prompts
    planned = step(scheduler)
    assert planned.arrived == ()
    assert verbs(planned)[-1] == ("RELEASE", 1, 0, 0)
    assert scheduler.snapshot().r_workers[0].free == scheduler.snapshot().r_workers[0].num_blocks


def test_a_prompt_of_a_lost_r_worker_starts_on_another() -> None:
    scheduler = make((100, 100))
    scheduler.add(Sequence(1, list(range(100)), 10))
    (prefill,) = step(scheduler).prefills
    assert scheduler.members.lost(prefill.stores[0].r_worker) == []
    (second,) = step(scheduler).prefills
    assert second.stores[0].r_worker != prefill.stores[0].r_worker
    assert prefill.job_id not in scheduler.remote_prompts


def test_a_step_that_is_taken_back_is_planned_again() -> None:
    scheduler = make()
    scheduler.add(Sequence(1, list(range(100)), 10))
    first = scheduler.schedule()
    scheduler.take_back(first)
    again = step(scheduler)
    assert (again.prefills, verbs(again)) == (first.prefills, verbs(first))
    scheduler.prefilled(first.prefills[0].job_id)
    arriving = scheduler.schedule()
    scheduler.take_back(arriving)
    last = step(scheduler)
    assert (last.arrived, verbs(last)) == ((1,), verbs(arriving))


@pytest.mark.parametrize("what", ["computed", "failed", "evicted", "aborted", "too short"])
def test_a_prompt_goes_on_from_a_prefix(what: str) -> None:
    """The prompt's parts begin after the prefix.

    Its blocks are the prefix's, whatever happens to the prefix and to the job.
    """
    scheduler = make()
    first = Sequence(1, list(range(160)), 2)
    scheduler.add(first)
    (prefill,) = step(scheduler).prefills
    scheduler.prefilled(prefill.job_id)
    step(scheduler)
    scheduler.finish(first, "length")
    second = Sequence(2, [*range(128), *range(500, 510 if what == "too short" else 580)], 4)
    scheduler.add(second)
    planned = step(scheduler)
    if what == "too short":
        assert planned.prefills == ()
        assert planned.mini_batches[0].chunks["context_len"].tolist() == [128]
        return
    (prefill,) = planned.prefills
    assert [(part.worker, part.start, part.end) for part in prefill.parts] == [(0, 128, 168), (1, 168, 208)]
    assert (prefill.context_len, prefill.token_ids) == (128, tuple(second.prompt_token_ids))
    *_, fork, reserve = verbs(planned)
    assert (fork[0], fork[1], fork[3]) == ("FORK", 2, 128)
    assert reserve == ("RESERVE", 2, prefill.job_id, 208)
    if what == "evicted":
        scheduler.store.prefixes.reset()
    if what == "failed":
        scheduler.prefill_failed(prefill.job_id)
        planned = step(scheduler)
        assert ("RELEASE", 2, 0, 0) in verbs(planned)
        (prefill,) = planned.prefills
        assert prefill.context_len == 128
    if what != "aborted":
        assert scheduler.prefilled(prefill.job_id)
        assert step(scheduler).arrived == (2,)
        assert second.num_cached == 208
    scheduler.finish(second, "abort")
    scheduler.store.prefixes.reset()
    step(scheduler)
    assert scheduler.snapshot().r_workers[0].free == scheduler.snapshot().r_workers[0].num_blocks


def test_siblings_fork_from_it() -> None:
    scheduler = make()
    parent = Sequence(1, list(range(100)), 10, siblings=(Sequence(2, list(range(100)), 10),))
    scheduler.add(parent)
    (prefill,) = step(scheduler).prefills
    scheduler.prefilled(prefill.job_id)
    step(scheduler)
    scheduler.store.fork_siblings(parent)
    scheduler.store.residents.decoding[2].append(7)
    assert ("FORK", 2, 1, 100) in verbs(step(scheduler))
    assert scheduler.snapshot().decoding == [1, 2]


def test_the_policy_hears_of_starts_and_ends() -> None:
    scheduler = make()
    for number in range(2):
        scheduler.add(Sequence(number, list(range(number, number + 100)), 10))
    one, two = step(scheduler).prefills
    scheduler.prefilled(one.job_id)
    scheduler.prefill_failed(two.job_id)
    policy = scheduler.remote_prompts.policy
    assert isinstance(policy, TwoWorkers)
    told = [call for call in policy.calls if call[0] != "step"]
    assert told == [("started", 1), ("started", 2), ("ended", 1, True), ("ended", 2, False)]


def places(prefill: RemotePrefill) -> list[tuple[int, int, int, int]]:
    """Return R-worker, tokens and whether the number is the job's own, of each store."""
    return [(each.r_worker, each.start, each.end, each.ticket == prefill.job_id) for each in prefill.stores]


def test_a_prompt_goes_to_both_copies() -> None:
    scheduler = make((100, 100), placing=Placing(copies=2))
    sequence = Sequence(1, list(range(100)), 10)
    scheduler.add(sequence)
    planned = step(scheduler)
    (prefill,) = planned.prefills
    home, second = sequence.holders
    assert places(prefill) == [(home, 0, 100, True), (second, 0, 100, False)]
    tickets = [each.ticket for each in prefill.stores]
    assert verbs(planned) == [("RESERVE", 1, tickets[each != home], 100) for each in (0, 1)]
    assert scheduler.prefilled(prefill.job_id)
    assert verbs(step(scheduler)) == [("COMMIT", 1, tickets[each != home], 100) for each in (0, 1)]
    assert scheduler.store.pool[1:] == (0, 1)


def test_a_prompt_goes_to_each_of_its_ranges_and_after_a_prefix_to_those_left() -> None:
    """A cached closed range stores nothing and serves its prefix."""
    scheduler = make((100, 100, 100), placing=Placing(32))
    first = Sequence(1, list(range(100)), 10)
    scheduler.add(first)
    (prefill,) = step(scheduler).prefills
    assert [place[1:3] for place in places(prefill)] == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert not prefill.prefix and len({each.ticket for each in prefill.stores}) == 4
    scheduler.prefilled(prefill.job_id)
    step(scheduler)
    assert [each.num_tokens for each in first.segments] == [32, 32, 32, 4] and first.num_closed == 3
    assert sum(len(part.chunks) for part in step(scheduler).mini_batches) == 1  # The sequence decodes.
    scheduler.finish(first)
    second = Sequence(2, [*range(100), *range(200, 270)], 10)
    scheduler.add(second)
    planned = step(scheduler)
    (prefill,) = planned.prefills
    assert [(each.start, each.end) for each in prefill.prefix] == [(0, 32), (32, 64), (64, 96)]
    assert [place[1:3] for place in places(prefill)] == [(96, 128), (128, 160), (160, 170)]
    reserved = [rest for name, *rest in verbs(planned) if name == "RESERVE"]
    assert sorted(rest[2] for rest in reserved) == [10, 32, 32, 32, 32, 32]
    assert {rest[1] for rest in reserved} == {each.ticket for each in (*prefill.prefix, *prefill.stores)}


def test_a_prompt_goes_on_with_the_r_worker_that_is_left() -> None:
    """One of two copies is lost, in one range or several; the loss of a range's only copy ends the job."""
    scheduler = make((100, 100, 100), placing=Placing(copies=2))
    sequence = Sequence(1, list(range(100)), 10)
    scheduler.add(sequence)
    (prefill,) = step(scheduler).prefills
    home, second = (each.r_worker for each in prefill.stores)
    assert scheduler.members.spoilt([home]) == [] and scheduler.members.lost(home) == []
    assert not step(scheduler).prefills and sequence.holders == [second]
    assert scheduler.prefilled(prefill.job_id)
    assert [rest for name, *rest in verbs(step(scheduler)) if name == "COMMIT"] == [[1, prefill.stores[1].ticket, 100]]
    other = Sequence(2, list(range(200, 300)), 10)
    scheduler.add(other)
    (prefill,) = step(scheduler).prefills
    assert scheduler.members.lost(prefill.stores[0].r_worker) == []
    assert scheduler.members.spoilt([prefill.stores[1].r_worker]) == [1, 2]


def test_a_prompt_in_ranges_begins_with_two_copies_of_each() -> None:
    """The loss of any R-worker therefore costs no row."""
    scheduler = make((100, 100, 100), placing=Placing(32, 2))
    sequence = Sequence(1, list(range(100)), 10)
    scheduler.add(sequence)
    (prefill,) = step(scheduler).prefills
    assert sorted(place[1:3] for place in places(prefill)) == sorted([(0, 32), (32, 64), (64, 96), (96, 100)] * 2)
    assert all(len(set(each.workers)) == 2 for each in sequence.segments)
    assert scheduler.members.lost(prefill.stores[0].r_worker) == []
    assert scheduler.prefilled(prefill.job_id) and not step(scheduler).prefills
    assert not sequence.in_prompt and all(each.copies for each in sequence.segments)


def test_a_lost_r_worker_ends_the_jobs_that_store_there_alone() -> None:
    scheduler = make((100, 100, 100), placing=Placing(32))
    sequence = Sequence(1, list(range(100)), 10)
    scheduler.add(sequence)
    (prefill,) = step(scheduler).prefills
    assert scheduler.members.lost(prefill.stores[1].r_worker) == []
    (again,) = step(scheduler).prefills
    assert prefill.job_id not in scheduler.remote_prompts and again.job_id in scheduler.remote_prompts
    assert prefill.stores[1].r_worker not in {each.r_worker for each in again.stores}
    assert not {each.ticket for each in again.stores} & {each.ticket for each in prefill.stores}


@pytest.mark.parametrize("num_missed", [1, 2])
def test_a_copy_that_could_not_be_stored_is_given_up(num_missed: int) -> None:
    """The R-worker without the rows releases its copy; without any copy the prompt is computed again."""
    scheduler = make((100, 100, 100), placing=Placing(copies=2))
    sequence = Sequence(1, list(range(100)), 10)
    scheduler.add(sequence)
    (prefill,) = step(scheduler).prefills
    missed = [each.ticket for each in prefill.stores[:num_missed]]
    assert scheduler.prefilled(prefill.job_id, 0.0, missed) == (num_missed == 1)
    told = step(scheduler)
    assert [rest[0] for name, *rest in verbs(told) if name == "RELEASE"] == [1] * num_missed
    assert len(told.prefills) == num_missed - 1 and len(sequence.holders) == num_missed


def test_a_prompt_that_arrives_in_a_step_that_fails_arrives_again() -> None:
    """The R-workers have got the step, but it failed, so the prompt is sampled in the next one."""
    jobs = [Job([1] * (20 + number), 8, [8]) for number in range(6)]
    limits = replace(AMPLE, num_blocks=(64, 64), bandwidths=(1.0, 1.0))
    for seed in range(3):
        run = Run("stall-free", limits, jobs, prefills_seed=seed)
        run.to_the_end(frozenset(range(0, 40, 2)))
        assert run.prefills.num_stored
