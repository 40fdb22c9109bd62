"""The scheduler against a naive recount of all its guarantees, step by step over random workloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from helpers.scheduler_harness import Drain, Job, Join, Run
from helpers.scheduler_mixes import draw as draw_mix
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.core.errors import RequestError
from fastdecode.core.placing import UNLIMITED, Placing
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep, deal
from fastdecode.core.types import CONTROL, SPAN, SpanMode, Verb
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler, Sequence


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw small budgets of every kind, so that each is reached; every job can run alone on the largest worker."""
    schedule = draw(st.sampled_from([*SCHEDULES, "sls", "sls"]))
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_num_seqs = draw(st.integers(1, 8))
    jobs = [draw(job(max_num_seqs)) for _ in range(draw(st.integers(1, 12)))]

    def need(job: Job) -> int:
        n, partial = len(job.lengths), len(job.prompt) % block_size > 0
        return max(-(-len(job.prompt) // block_size) + (n - 1) * partial, -(-longest(job) // block_size))

    def longest(job: Job) -> int:
        return len(job.prompt) + job.max_tokens - 1

    max_model_len = max(map(longest, jobs)) + 1
    largest = max(map(need, jobs)) + draw(st.integers(0, 30))
    if SCHEDULES[schedule].reserves_longest:
        largest = max(largest, -(-max_model_len // block_size) * max(len(job.lengths) for job in jobs))
    others = draw(st.lists(st.integers(1, largest), max_size=2))
    bandwidths = [draw(st.sampled_from([1.0, 2.0])) for _ in [*others, largest]]
    smallest = max(longest(job) * len(job.lengths) for job in jobs) * sum(bandwidths) / bandwidths[-1]
    limit = draw(st.none() | st.integers(0, 200).map(lambda more: int(np.ceil(smallest)) + more))
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        num_mini_batches=draw(st.integers(1, 4)),
        scratch_tokens=draw(st.sampled_from([0, 5, 30, 1000])),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=(*others, largest),
        bandwidths=tuple(bandwidths),
        kv_load_limit=limit,
        micro_batch_interval=draw(st.none() | st.integers(1, 5)),
        prefix_caching=draw(st.booleans()),
        seconds_per_moved_token=0.0,
        num_speculative_tokens=draw(st.sampled_from([0, 1, 3, 8])),
        placing=Placing(draw(range_lengths(schedule, block_size))),
    )

    slowness = draw(
        st.none() | st.lists(st.sampled_from([0.1, 0.3]), min_size=len(bandwidths), max_size=len(bandwidths))
    )
    seeds = {"drafts_seed": draw(st.integers(0, 99)), "prefills_seed": draw(st.none() | st.integers(0, 99))}
    return Run(schedule, limits, jobs, seconds_per_token=tuple(slowness or ()), **seeds)


def range_lengths(schedule: str, block_size: int) -> st.SearchStrategy[int]:
    """Draw ranges so short that most sequences have several, or none."""
    if SCHEDULES[schedule].reserves_longest:
        return st.just(UNLIMITED)
    return st.sampled_from([UNLIMITED, 4 * block_size, 8 * block_size, 12 * block_size])


@st.composite
def job(draw: st.DrawFn, max_num_seqs: int) -> Job:
    """Draw prompts of two families; within one, a prompt begins another one or differs from it somewhere."""
    family, length = draw(st.integers(0, 1)), draw(st.integers(1, 40))
    shared = draw(st.integers(0, length))
    prompt = [1000 * family + i for i in range(shared)]
    prompt += [draw(st.integers(5000, 5002)) for _ in range(min(3, length - shared))]
    most = draw(st.integers(1, 20))
    n = draw(st.integers(1, min(4, max_num_seqs)))
    lengths = draw(st.lists(st.integers(1, most), min_size=n, max_size=n))
    return Job(prompt or [1], most, lengths, draw(st.integers(0, 8)), draw(st.none() | st.integers(0, 12)))


@given(runs(), st.frozensets(st.integers(0, 20), max_size=3))
@settings(max_examples=examples(350))
def test_every_promise_in_every_step(run: Run, fail_steps: frozenset[int]) -> None:
    """Sequences move between steps, at no cost, where R-workers are slower than expected."""
    run.to_the_end(fail_steps, moves_per_step=2)


@pytest.mark.slow
@given(runs(), st.dictionaries(st.integers(0, 15), st.integers(0, 2), max_size=2))
@settings(max_examples=examples(160))
def test_every_promise_though_workers_are_lost(run: Run, losses: dict[int, int]) -> None:
    """All R-workers but the last may be lost, each once."""
    workers = list(dict.fromkeys(worker for worker in losses.values() if worker < len(run.limits.num_blocks) - 1))
    run.to_the_end(losses=dict(zip(losses, workers, strict=False)), moves_per_step=2)


@st.composite
def changes(draw: st.DrawFn) -> dict[int, Join | Drain]:
    """Draw which R-workers join and drain, and in which step."""
    join = st.builds(Join, st.integers(1, 60), st.sampled_from([1.0, 2.0]))
    return draw(st.dictionaries(st.integers(0, 15), join | st.builds(Drain, st.integers(0, 3)), max_size=4))


@pytest.mark.slow
@given(runs(), changes(), st.integers(1, 4))
@settings(max_examples=examples(150))
def test_every_promise_though_workers_join_and_leave(
    run: Run, changes: dict[int, Join | Drain], moves_per_step: int
) -> None:
    """Even if all R-workers are to leave, no sequence is lost, and nothing is left behind.

    The largest stays while jobs arrive, since some fit nowhere else.
    """
    num_workers, last_arrival = len(run.limits.num_blocks), max(job.arrives for job in run.jobs)
    for step in sorted(changes):
        change = changes[step]
        num_workers += isinstance(change, Join)
        too_early = step < last_arrival and change == Drain(len(run.limits.num_blocks) - 1)
        if too_early or (isinstance(change, Drain) and change.worker >= num_workers):
            del changes[step]
    run.to_the_end(changes=changes, moves_per_step=moves_per_step)


@given(runs(), st.dictionaries(st.integers(0, 15), st.integers(0, 1), max_size=2), changes(), st.booleans())
@settings(max_examples=examples(150))
def test_every_promise_with_two_copies(
    run: Run, losses: dict[int, int], changes: dict[int, Join | Drain], in_ranges: bool
) -> None:
    """Two of three R-workers share a host, up to two are lost in a step, one may drain, and others join."""
    largest, limit = max(run.limits.num_blocks), run.limits.kv_load_limit
    limits = replace(
        run.limits,
        hosts=("a", "b", "a"),
        placing=Placing(run.limits.placing.segment_tokens if in_ranges else UNLIMITED, 2),
        num_blocks=(largest, max(1, largest - 3), largest),
        bandwidths=(1.0, 2.0, 1.0),
        kv_load_limit=None if limit is None else 8 * limit,
        seconds_per_moved_token=0.1,
    )
    slowness = (0.1, 0.3, 0.1) * bool(run.seconds_per_token)
    two = Run(run.schedule, limits, run.jobs, True, slowness, run.drafts_seed, run.prefills_seed)
    lost = list(dict.fromkeys(losses.values()))
    changes = {step: change for step, change in changes.items() if isinstance(change, Join) or change == Drain(0)}
    two.to_the_end(losses=dict(zip(losses, lost, strict=False)), changes=changes, moves_per_step=2)


@given(
    runs(),
    st.dictionaries(st.integers(0, 15), st.integers(0, 1), max_size=2),
    st.dictionaries(st.integers(0, 15), st.just(Drain(0)), max_size=1),
    st.sampled_from([(1, 2), (2, 2), (1, 8), (2, 8), (2, UNLIMITED)]),
)
@settings(max_examples=examples(200))
def test_every_promise_of_prompts_that_prefill_workers_compute(
    run: Run, losses: dict[int, int], drains: dict[int, Drain], places: tuple[int, int]
) -> None:
    """Prompts are stored in ranges on one or two R-workers, after kept prefixes; R-workers are lost meanwhile."""
    copies, blocks = places
    reserves = SCHEDULES[run.schedule].reserves_longest
    block_size, largest = min(4, run.limits.block_size), 4 * max(run.limits.num_blocks)
    limits = replace(
        run.limits,
        block_size=block_size,
        prefix_caching=True,
        hosts=("a", "b", "a"),
        placing=Placing(UNLIMITED if reserves else min(UNLIMITED, blocks * block_size), copies),
        num_blocks=(largest, largest, largest),
        bandwidths=(1.0, 2.0, 1.0),
        kv_load_limit=None,
    )
    there = Run(run.schedule, limits, run.jobs, drafts_seed=run.drafts_seed, prefills_seed=run.drafts_seed)
    lost = list(dict.fromkeys(losses.values()))
    there.to_the_end(losses=dict(zip(losses, lost, strict=False)), changes=dict(drains), moves_per_step=2)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(40, 1600, 40))]
)
def test_every_promise_with_all_features_together(first: int) -> None:
    for seed in range(first, first + 40):
        try:
            draw_mix(seed).to_the_end()
        except Exception as error:
            raise AssertionError(f"the mix of seed {seed}: {error!r}") from error


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(15, 600, 195))]
)
def test_every_promise_for_hybrids(first: int) -> None:
    """Naive R-workers refuse a state that is not that of all tokens before."""
    for seed in range(first, first + (195 if first else 15)):
        try:
            draw_mix(seed, of_hybrid=True).to_the_end()
        except Exception as error:
            raise AssertionError(f"the hybrids' mix of seed {seed}: {error!r}") from error


def limits_of(**changes: Any) -> Limits:
    defaults = Limits(8, 64, 1, 1000, 100, 4, (100,), (1.0,), prefix_caching=False)
    return replace(defaults, **changes)


def scheduler_of(schedule: str = "stall-free", **changes: Any) -> Scheduler:
    return Scheduler(SCHEDULES[schedule], limits_of(**changes))


def chunks_of(step: ScheduledStep) -> list[tuple[int, int, int]]:
    return [(c.sequence_id, c.context_len, len(c.token_ids)) for chunks in step.mini_batches for c in chunks]


MIXES = {
    "stall-free": [[(0, 0, 6), (1, 0, 4)], [(0, 6, 1), (1, 4, 8), (2, 0, 1)], [(0, 7, 1), (1, 12, 1), (2, 1, 2)]],
    "sls": [[(0, 0, 6), (1, 0, 4)], [(0, 6, 1), (1, 4, 8), (2, 0, 1)], [(0, 7, 1), (1, 12, 1), (2, 1, 2)]],
    "fcfs": [[(0, 0, 6)], [(0, 6, 1), (1, 0, 9)], [(0, 7, 1), (1, 9, 3), (2, 0, 3)]],
    "prefill-first": [[(0, 0, 6)], [(1, 0, 10)], [(1, 10, 2), (2, 0, 3)]],
    "hybrid": [
        [(0, 0, 6), (1, 0, 12), (2, 0, 3)],
        [(0, 6, 1), (1, 12, 1), (2, 3, 1)],
        [(0, 7, 1), (1, 13, 1), (2, 4, 1)],
    ],
}


@pytest.mark.parametrize("schedule", MIXES)
def test_how_each_schedule_mixes_prompts_and_decodes(schedule: str) -> None:
    """Prompts of 6, 12 and 3 tokens run under a budget of 10."""
    scheduler = scheduler_of(schedule, max_num_batched_tokens=10)
    waiting = [Sequence(i, list(range(length)), 4) for i, length in enumerate((6, 12, 3))]
    for sequence in waiting:
        scheduler.add(sequence)
    plans = []
    for _ in range(3):
        step = scheduler.schedule()
        plans.append(sorted(chunks_of(step)))
        scheduler.commit(step)
        for sequence_id in (i for part in step.mini_batches for i in part.sampled_ids):
            waiting[sequence_id].append(9)
    assert plans == MIXES[schedule]


def test_request_level_starts_nobody_before_all_have_ended() -> None:
    limits = limits_of(max_num_seqs=2)
    run = Run("request-level", limits, [Job([1] * 5, 9, [length]) for length in (3, 6, 2, 2)])
    run.to_the_end()
    assert run.starts == [(0, 0), (0, 100), (6, 200), (6, 300)]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = scheduler_of(num_blocks=(10,))
    running, large, small = Sequence(0, [1] * 8, 13), Sequence(1, [1] * 38, 3), Sequence(2, [1], 2)
    for sequence in (running, large, small):
        scheduler.add(sequence)
    step = scheduler.schedule()
    scheduler.commit(step)
    assert chunks_of(step) == [(0, 0, 8)]
    running.append(9)
    scheduler.finish(running)
    step = scheduler.schedule()
    assert chunks_of(step) == [(1, 0, 38)]
    assert step.controls == (((Verb.RELEASE, 0, 0, 0),),)


def test_when_blocks_run_out_the_youngest_is_computed_again() -> None:
    """Six blocks of 4 hold two of the three sequences that grow to 10 tokens."""
    run = Run("stall-free", limits_of(num_blocks=(6,)), [Job([i] * 4, 7, [7]) for i in range(3)])
    run.to_the_end()
    assert run.scheduler.statistics.preemptions >= 1
    assert [sequence_id for _, sequence_id in run.starts][:3] == [0, 100, 200]
    assert all(len(group[0].output_token_ids) == 7 for group in run.members)


def test_who_was_preempted_gets_on_before_being_preempted_again() -> None:
    """Five sequences grow to 40 tokens in room for two and a half; each that comes back gets tokens before leaving."""
    limits = limits_of(num_blocks=(25,), max_num_batched_tokens=200)
    run = Run("stall-free", limits, [Job([i] * 12, 28, [28]) for i in range(5)])
    at_last_preemption: dict[int, int] = {}
    preempt = run.scheduler.lifecycle.preempt

    def noted(sequence: Sequence) -> None:
        count = len(sequence.output_token_ids)
        assert count > at_last_preemption.get(sequence.sequence_id, -1)
        at_last_preemption[sequence.sequence_id] = count
        preempt(sequence)

    run.scheduler.lifecycle.preempt = noted  # type: ignore[method-assign]
    run.to_the_end()
    assert at_last_preemption, "no sequence was preempted"


def test_a_reservation_for_siblings_counts_shared_blocks_once() -> None:
    limits = limits_of(num_blocks=(5, 20), bandwidths=(1.0, 1.0))
    run = Run("stall-free", limits, [Job([0] * 10, 3, [3, 3, 3])])
    run.arrive_and_abort()
    run.step()
    free = [worker.free for worker in run.scheduler.snapshot().r_workers]
    assert free == [5, 20 - (2 + 3)]  # All share two full blocks, and each has a third.


@pytest.mark.parametrize(
    ("changes", "sequence", "message"),
    [
        ({"max_num_seqs": 1}, (8, 4, 2), "n is 2, and max_num_seqs is 1"),
        ({"num_blocks": (3,)}, (8, 6, 1), "1 sequences need 4 KV blocks, and the largest R-worker has 3: lower n"),
        (
            {"kv_load_limit": 30},
            (20, 12, 1),
            "31 cached tokens .* KV load limit 30: give a kv_load_limit of at least 31",
        ),
        (
            {"kv_load_limit": 60, "num_blocks": (99, 99), "bandwidths": (1.0, 2.0)},
            (20, 22, 1),
            "41 cached tokens exceeds the largest R-worker's share, 40 tokens, .* at least 62",
        ),
    ],
)
def test_what_can_never_run_is_refused(changes: dict[str, Any], sequence: tuple[int, int, int], message: str) -> None:
    prompt_len, max_tokens, n = sequence
    scheduler = scheduler_of("sls", **changes)
    parent = Sequence(0, [0] * prompt_len, max_tokens)
    parent.siblings = tuple(Sequence(i, [0] * prompt_len, max_tokens) for i in range(1, n))
    with pytest.raises(RequestError, match=message):
        scheduler.add(parent)
    assert not scheduler.has_unfinished


def test_unborn_siblings_take_places() -> None:
    scheduler = scheduler_of(max_num_seqs=4)
    parent = Sequence(0, [0] * 8, 5)
    parent.siblings = (Sequence(1, [0] * 8, 5), Sequence(2, [0] * 8, 5))
    for sequence in (parent, Sequence(3, [0] * 8, 5), Sequence(4, [0] * 8, 5)):
        scheduler.add(sequence)
    step = scheduler.schedule()
    assert [sequence_id for sequence_id, *_ in chunks_of(step)] == [0, 3]
    scheduler.commit(step)
    assert scheduler.snapshot().num_running == 4


def test_a_refused_step_gives_its_controls_back() -> None:
    scheduler = scheduler_of()
    first, second = Sequence(0, [1] * 5, 5), Sequence(1, [1] * 5, 5)
    scheduler.add(first)
    scheduler.commit(scheduler.schedule())
    scheduler.finish(first)
    scheduler.add(second)
    step = scheduler.schedule()
    assert step.controls == (((Verb.RELEASE, 0, 0, 0),),)
    scheduler.take_back(step)
    assert scheduler.schedule().controls == step.controls
    assert scheduler.schedule().controls == ((),)


def test_a_prompt_that_attends_in_many_ranges_goes_in_shorter_pieces() -> None:
    """Each row has a partial result per range, and R-workers take a limited number of them at once."""
    scheduler = scheduler_of(
        scratch_tokens=0,
        placing=Placing(512),
        num_blocks=(500, 500),
        bandwidths=(1.0, 1.0),
        max_num_batched_tokens=5000,
        max_model_len=3000,
    )
    scheduler.add(Sequence(0, [0] * 2500, 2))
    rows = []
    while sum(count for _, count in rows) < 2500:
        step = scheduler.schedule()
        rows += [(len(chunk.reads), len(chunk.token_ids)) for part in step.mini_batches for chunk in part]
        scheduler.commit(step)
    assert rows == [(0, 512), (1, 512), (2, 512), (3, 512), (4, 409), (4, 43)]


def test_a_range_that_was_attended_on_a_lost_r_worker_is_computed_again() -> None:
    """A step fills the first range, whose second copy stays.

    Its R-worker is lost, and was the only one with the next range.
    """
    limits = limits_of(max_num_batched_tokens=8, scratch_tokens=0, num_blocks=(100, 100), bandwidths=(1.0, 1.0))
    scheduler = Scheduler(SCHEDULES["stall-free"], replace(limits, placing=Placing(8, 2), hosts=("a", "b")))
    sequence = Sequence(0, list(range(12)), 3)
    scheduler.add(sequence)
    step = scheduler.schedule()
    first, ahead = sequence.segments
    assert first.twice and ahead.twice
    scheduler.store.give_up(sequence, ahead, first.workers[1])
    scheduler.commit(step)
    assert scheduler.members.spoilt([first.home]) == [0]
    scheduler.members.lost(first.home)
    assert [chunk.context_len for mini_batch in scheduler.schedule().mini_batches for chunk in mini_batch] == [0]


def test_prompts_that_do_not_fit_the_scratch_attend_on_the_r_worker() -> None:
    scheduler = scheduler_of(scratch_tokens=20)
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
        Chunk(i, worker, context, (i,) * count, attends=count == 1 or i % 2 == 0, is_decode=count == 1)
        for i, (worker, context, count) in enumerate(rows)
    ]
    decodes = sorted((c for c in chunks if c.is_decode), key=lambda chunk: (chunk.worker, -chunk.context_len))
    dealt = deal(MiniBatch.of(decodes), [chunk for chunk in chunks if not chunk.is_decode], k)
    assert sorted(chunk.sequence_id for part in dealt for chunk in part) == list(range(len(rows)))
    for part in dealt:
        assert [token for chunk in part for token in chunk.token_ids] == part.token_ids.tolist()
        assert all(set(chunk.token_ids) == {chunk.sequence_id} for chunk in part)
        order = [(chunk.worker, not chunk.attends) for chunk in part]
        assert order == sorted(order)
    singles = [[chunk for chunk in part if chunk.is_decode] for part in dealt]
    counts = [len(part) for part in singles]
    assert max(counts) - min(counts) <= 1
    for worker in range(3):
        loads = [sum(chunk.context_len for chunk in part if chunk.worker == worker) for part in singles]
        longest = max((chunk.context_len for part in singles for chunk in part if chunk.worker == worker), default=0)
        assert max(loads) - min(loads) <= 2 * longest
    totals = [sum(len(chunk.token_ids) for chunk in part) for part in dealt]
    assert max(totals) - min(totals) <= max((len(chunk.token_ids) for chunk in chunks), default=0)


def test_mini_batches_stay_balanced_as_sequences_come_and_go() -> None:
    """In every step of a run with arrivals and unequal ends rows differ by one, and loads by less than two contexts."""
    rng = np.random.default_rng(0)
    jobs = [
        Job([1] * int(rng.integers(1, 60)), 90, [int(rng.integers(2, 90))], int(rng.integers(0, 200)))
        for _ in range(99)
    ]
    run = Run("sls", limits_of(max_num_seqs=24, num_mini_batches=2, num_blocks=(2000,), max_model_len=200), jobs)
    while run.step_number < 200 or run.alive:
        run.arrive_and_abort()
        if run.alive:
            singles = [[c.context_len for c in part if c.is_decode] for part in run.step().mini_batches]
            assert abs(len(singles[0]) - len(singles[1])) <= 1
            assert abs(sum(singles[0]) - sum(singles[1])) <= 2 * max(map(max, filter(None, singles)), default=0)
        run.step_number += 1


def test_step_plan() -> None:
    """Every worker lists every mini-batch; spans are the chunks in order, and controls are unchanged."""
    decode, prompt = Chunk(5, 0, 40, (9,)), Chunk(6, 1, 8, (1, 2, 3), attends=False, samples=False, is_decode=False)
    remote = Chunk(7, 1, 0, (4, 5), is_decode=False)
    mixed = MiniBatch.sorted([MiniBatch.of([prompt, decode]), MiniBatch.of([remote])])
    assert list(mixed) == [replace(chunk, token_ids=list(chunk.token_ids)) for chunk in (decode, remote, prompt)]
    step = ScheduledStep((mixed, MiniBatch.of([])), (((Verb.FORK, 8, 5, 40),), ()))
    assert (step.num_tokens, step.kv_loads, step.kv_load, step.is_decode) == (6, [41, 2], 43, False)
    assert ScheduledStep((MiniBatch.of([decode]),), ((),)).is_decode
    plan = step.to_step_plan()
    first, second = plan.workers
    assert first.controls.dtype == CONTROL and first.controls.tolist() == [(0, 8, 5, 40)]
    assert second.controls.dtype == CONTROL and len(second.controls) == 0
    assert [spans.dtype for worker in plan.workers for spans in worker.mini_batches] == [SPAN] * 4
    assert [spans.tolist() for spans in first.mini_batches] == [[(5, 40, 1, 1)], []]
    assert [spans.tolist() for spans in second.mini_batches] == [[(7, 0, 2, 1), (6, 8, 3, 0)], []]


def test_a_sequence_of_several_ranges_in_a_step_plan() -> None:
    """A sequence has two closed ranges of 1,024 tokens and a tail of 10, whose rows follow those of lone sequences."""
    lone = Chunk(5, 1, 40, (9,))
    long = Chunk(6, 1, 2058, (1, 2), base=2048, reads=((0, 61, 0), (1, 62, 1024)))
    appended = Chunk(7, 1, 1030, (3, 4, 5), attends=False, is_decode=False, base=1024)
    only = Chunk(8, 0, 1500, (7,), base=1024, reads=((1, 61, 0),))
    mixed = MiniBatch.sorted([MiniBatch.of([appended, long]), MiniBatch.of([lone, only])])
    assert [chunk.sequence_id for chunk in mixed] == [8, 5, 6, 7]
    assert [chunk.reads for chunk in mixed] == [only.reads, (), long.reads, ()]
    assert mixed.read_ends.tolist() == [1024, 1024, 2048]
    step = ScheduledStep((MiniBatch.of([lone]), mixed), ((), ()))
    assert step.kv_loads == [477 + 1024, 41 + 1024 + 41 + 12 + 1024]
    plan = step.to_step_plan()
    first, second = (worker.mini_batches[1].tolist() for worker in plan.workers)
    assert first == [(61, 2058, 2, SpanMode.READ), (8, 476, 1, SpanMode.PARTIAL)]
    assert second == [
        (61, 1500, 1, SpanMode.READ),
        (62, 1034, 2, SpanMode.READ),
        (5, 40, 1, SpanMode.ATTEND),
        (6, 10, 2, SpanMode.PARTIAL),
        (7, 6, 3, SpanMode.APPEND),
    ]
    lone_only, routes = plan.routes
    assert not len(lone_only.merge.merged) and [route.q_rows for route in lone_only.workers] == [
        slice(0, 0),
        slice(0, 1),
    ]
    first, second = routes.workers
    assert [first.q_rows.tolist(), first.kv_rows, first.o_rows] == [[2, 3, 0], slice(0, 1), slice(0, 0)]
    assert [second.q_rows.tolist(), second.kv_rows, second.o_rows] == [[0, 2, 3, 1, 2, 3], slice(1, 7), slice(1, 2)]
    assert [first.num_partials, second.num_partials] == [2 + 1, 1 + 2 + 2]
    assert routes.merge.merged.tolist() == [(0, 1, 0, 2), (2, 2, 2, 3)]
    assert routes.merge.parts.tolist() == [
        (1, 0, 1, 0, 2),
        (0, 2, 1, 2, 1),
        (0, 0, 1, 0, 2),
        (1, 1, 1, 2, 2),
        (1, 3, 1, 4, 1),
    ]
    (dealt,) = deal(MiniBatch.of([only, long, lone]), [], 1)
    assert [(chunk.sequence_id, len(chunk.reads)) for chunk in dealt] == [(8, 1), (5, 0), (6, 2)]
    assert [list(part) for part in deal(MiniBatch.of([only, lone, long]), [], 2)] == [
        [replace(only, token_ids=[7])],
        [replace(lone, token_ids=[9]), replace(long, token_ids=[1, 2])],
    ]


def moving(num_blocks: tuple[int, ...], num_jobs: int = 8) -> Run:
    """Return a run of jobs of 20 + 30 tokens, all decoding on the R-workers, with blocks of 4 tokens."""
    limits = limits_of(num_blocks=num_blocks, bandwidths=(1.0,) * len(num_blocks), max_num_batched_tokens=1000)
    run = Run("stall-free", limits, [Job([number] * 20, 30, [30]) for number in range(num_jobs)])
    run.arrive_and_abort()
    for _ in range(3):
        run.step()
    return run


@pytest.mark.parametrize(("bandwidth", "wanted"), [(1.0, 4), (3.0, 6)])
def test_a_newcomer_gets_its_part_of_what_runs(bandwidth: float, wanted: int) -> None:
    run = moving((200,))
    run.scheduler.members.join(200, bandwidth)
    run.move(100)
    assert run.num_moves == wanted
    assert [len(run.scheduler.snapshot().on(worker)) for worker in (0, 1)] == [8 - wanted, wanted]
    run.step_number += 1
    run.to_the_end(moves_per_step=8)
    assert run.num_moves == wanted, "even loads stay where they are"


def test_draining_moves_everybody_and_preempts_whom_nobody_has_room_for() -> None:
    """The other R-worker has room for five of eight sequences, each with a block to grow into."""
    run = moving((200,))
    run.scheduler.members.join(5 * 7 + 4, 1e-9)
    run.scheduler.members.drain(0)
    run.move(100)
    assert run.num_moves == 5 and run.scheduler.statistics.preemptions == 3
    assert run.scheduler.snapshot().present == [1]
    run.step_number += 1
    run.to_the_end()
    assert all(len(group[0].output_token_ids) == 30 for group in run.members)


def test_the_last_one_that_drains_goes_on_until_another_comes() -> None:
    run = moving((200,))
    run.scheduler.members.drain(0)
    run.move(100)
    run.step()
    assert run.num_moves == 0 and run.scheduler.members.drained() == []
    run.scheduler.members.join(200, 1.0)
    run.move(100)
    assert run.num_moves == 8 and run.scheduler.snapshot().present == [1]
    run.step_number += 1
    run.to_the_end()


def test_those_that_join_take_the_places_of_the_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many R-workers come and go, the scheduler's arrays stop growing, and no sequence is lost."""
    monkeypatch.setattr("fastdecode.scheduler.places.workers.KEPT_GONE", 2)
    run = moving((200,))
    scheduler, workers = run.scheduler, run.scheduler.store.workers
    for number in range(12):
        index = (workers.vacant or [len(workers)])[0]
        scheduler.members.join(200 + number, 1.0 + number, index)
        assert workers.present == sorted([0, index]) and workers[index].available == 200 + number
        assert workers.speeds.bandwidths[index] == 1.0 + number and scheduler.load_limit.shares.sum() == pytest.approx(
            1.0
        )
        run.move(100)
        run.step()
        assert not run.lose(index)
        run.step()
    assert len(workers) == 4 and len(workers.vacant) == 1
    run.step_number += 1
    run.to_the_end()
    assert all(len(group[0].output_token_ids) == 30 for group in run.members)


@pytest.mark.parametrize("event", ["lost", "drained"])
def test_a_follower_needs_its_r_worker_too(event: str) -> None:
    """Only the second R-worker could ever hold the third sequence, which waits for the second one's prefix."""
    limits = Limits(
        max_num_seqs=8, max_num_batched_tokens=64, num_mini_batches=1, scratch_tokens=10_000, max_model_len=4096,
        block_size=16, num_blocks=(20, 200, 20), bandwidths=(1.0, 1.0, 1.0),
    )  # fmt: skip
    scheduler = Scheduler(SCHEDULES["sls"], limits)
    prefix = list(range(200))
    scheduler.add(Sequence(0, [8] * 40, 3))
    scheduler.commit(scheduler.schedule())
    scheduler.store.residents.decoding[0].append(1)
    for each in (Sequence(1, prefix + [7] * 10, 5), Sequence(2, prefix + [9] * 150, 400), Sequence(3, [5] * 20, 5)):
        scheduler.add(each)
    scheduler.commit(scheduler.schedule())
    assert [*scheduler.snapshot().following] == [2]
    if event == "lost":
        assert [each.sequence_id for each in scheduler.members.lost(1)] == [2]
    else:
        scheduler.members.drain(1)
    drained_while_needed = False
    for _ in range(600):
        while move := scheduler.transfers.begin_next():
            scheduler.transfers.done(move, 0.0)
        drained_while_needed |= bool(scheduler.members.drained()) and 2 in [
            each.sequence_id for each in _unfinished(scheduler)
        ]
        if not scheduler.has_unfinished:
            break
        step = scheduler.schedule()
        assert step.num_tokens
        scheduler.commit(step)
        for sequence in list(scheduler.store.residents.decoding.values()):
            sequence.append(3)
            if len(sequence.output_token_ids) >= sequence.max_tokens:
                scheduler.finish(sequence, "length")
    assert not scheduler.has_unfinished and not drained_while_needed


def _unfinished(scheduler: Scheduler) -> list[Sequence]:
    return [
        *scheduler.queue.all,
        *scheduler.store.residents.decoding.values(),
        *scheduler.store.residents.prompts.values(),
    ]
