"""The choice of where prompts are computed, against every other choice, and with measured times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.remote_prefill import PrefillPart
from fastdecode.perfmodel.partition import Forecast, PartitionEntry, PartitionTable, even
from fastdecode.perfmodel.prefill_times import PrefillLink, PrefillTimes, PromptAttentionTimes
from fastdecode.perfmodel.stages import MeasuredSPart
from fastdecode.scheduler.policy.prefill_policy import LeastWaiting


@dataclass(frozen=True)
class Stub:
    """A model of a millisecond per token and worker, and a fixed cost of a chain that grows with its length."""

    hand_over_seconds: float = 0.1

    def parts(self, num_tokens: int, speeds: Sequence[float], context_len: int = 0) -> tuple[int, ...]:
        return even(num_tokens, len(speeds))

    def seconds(self, parts: Sequence[int], speeds: Sequence[float], context_len: int = 0) -> tuple[float, ...]:
        each = zip(parts, speeds, strict=True)
        return tuple(i * self.hand_over_seconds + rows * 1e-3 / speed for i, (rows, speed) in enumerate(each))


def workers_of(parts: tuple[PrefillPart, ...]) -> list[int]:
    return [part.worker for part in parts]


def test_a_lone_prompt_takes_all_workers_and_many_take_one_each() -> None:
    policy = LeastWaiting(Stub(0.2), workers=range(4))
    alone = policy.assign(4000)
    assert alone == tuple(PrefillPart(i, 1000 * i, 1000 * (i + 1)) for i in range(4))
    policy.begin_step(0.0, num_waiting=100)
    seen = []
    for job_id in range(8):
        parts = policy.assign(4000)
        policy.started(job_id, parts)
        seen.append(workers_of(parts))
    assert seen == [[0], [1], [2], [3]] * 2


def test_a_prompt_stays_on_the_s_worker_where_that_is_sooner() -> None:
    """Short prompts stay, and long ones while the workers are busy, unless other sequences would wait meanwhile."""
    policy = LeastWaiting(Stub(), lambda num_tokens, context_len: 0.05 + num_tokens * 2e-3, range(2))
    assert policy.assign(40) != ()
    assert LeastWaiting(Stub(0.1), lambda num_tokens, context_len: num_tokens * 5e-4, range(2)).assign(40) == ()
    policy.started(1, policy.assign(10_000))
    assert policy.assign(1000) == ()
    policy.begin_step(0.0, num_decoding=10)
    assert policy.assign(1000) != ()


def test_no_workers_and_fewer_tokens_than_workers() -> None:
    assert LeastWaiting(Stub()).assign(1000) == ()
    assert len(LeastWaiting(Stub(0.0), workers=range(4)).assign(2)) <= 2


def least_waited(free: list[float], num_tokens: int, waiting: int, stub: Stub) -> float:
    """Return the least wait over every choice of workers, in every order, by the rule's own words."""
    found = []
    for size in range(1, len(free) + 1):
        for chosen in itertools.permutations(free, size):
            ends = stub.seconds(stub.parts(num_tokens, [1.0] * size), [1.0] * size)
            taken = [max(chosen) + end - each for end, each in zip(ends, chosen, strict=True)]
            found.append(max(chosen) + ends[-1] + waiting * sum(taken) / len(free))
    return min(found)


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    st.integers(10, 4000),
    st.integers(0, 20),
    st.floats(0.01, 1.0),
)
def test_no_choice_of_equal_workers_makes_all_wait_less(
    backlog: list[int], num_tokens: int, waiting: int, hand_over_seconds: float
) -> None:
    stub = Stub(hand_over_seconds)
    policy = LeastWaiting(stub, workers=range(len(backlog)))
    for worker, tokens in enumerate(backlog):
        if tokens:
            policy.started(worker, (PrefillPart(worker, 0, tokens),))
    free = [tokens * 1e-3 for tokens in backlog]
    assert policy.backlog_seconds() == pytest.approx(dict(enumerate(free)))
    policy.begin_step(0.0, num_waiting=waiting + 1)
    parts = policy.assign(num_tokens)
    ends = stub.seconds([part.end - part.start for part in parts], [1.0] * len(parts))
    start = max(free[part.worker] for part in parts)
    taken = sum(start + end - free[part.worker] for part, end in zip(parts, ends, strict=True))
    ours = start + ends[-1] + waiting * taken / len(free)
    assert ours == pytest.approx(least_waited(free, num_tokens, waiting, stub))
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == num_tokens


def test_what_a_prompt_took_corrects_its_workers() -> None:
    """Worker 1 takes four times as long as predicted; it gets less and less, but still a share of the queue."""
    model = PrefillTimes(4, MeasuredSPart((100,), (0.1,), (0.0,)), PromptAttentionTimes(1e-9), 1.0)
    policy = LeastWaiting(Forecast(model), workers=range(2))
    now = 0.0
    for job_id in range(40):
        parts = (PrefillPart(job_id % 2, 0, 1000),)
        policy.begin_step(now)
        policy.started(job_id, parts)
        now += 4.0 * (4 if job_id % 2 else 1)
        policy.ended(job_id, now, computed=True)
    policy.begin_step(now)
    rows = {part.worker: part.end - part.start for part in policy.assign(1000)}
    assert rows[0] == pytest.approx(800, abs=40)
    assert rows[1] == pytest.approx(200, abs=40)


def test_an_abort_says_nothing_about_speed_and_frees_the_workers() -> None:
    policy = LeastWaiting(Stub(), workers=range(2))
    before = policy.assign(1000)
    policy.started(7, before)
    assert max(policy.backlog_seconds().values()) > 0.5
    policy.begin_step(0.01)
    policy.ended(7, 0.01)
    policy.ended(7, 0.02)
    policy.ended(8, 0.02, computed=True)
    assert policy.backlog_seconds() == {0: 0.0, 1: 0.0}
    assert policy.assign(1000) == before


def test_a_late_prompt_still_holds_its_worker() -> None:
    """The first worker of a chain ends as predicted and the last does not, so the last one's next work waits."""
    policy = LeastWaiting(Stub(0.01), workers=range(2))
    policy.started(1, (PrefillPart(0, 0, 100), PrefillPart(1, 100, 200)))
    policy.started(2, (PrefillPart(1, 0, 300),))
    policy.begin_step(5.0)
    assert policy.backlog_seconds() == pytest.approx({0: 0.0, 1: 0.3})
    assert workers_of(policy.assign(50))[0] == 0


def test_parts_begin_after_a_prefix_and_its_attention_counts() -> None:
    """The longer the prefix, the longer the prompt takes, and the less the last part costs more than the first."""
    model = PrefillTimes(
        4, MeasuredSPart((100,), (1e-3,), (0.0,)), PromptAttentionTimes(1e-6), 10.0, PrefillLink(1e9, 1e-4)
    )
    policy = LeastWaiting(Forecast(model, method="tsp"), lambda num_tokens, context_len: 1.0 + context_len, range(2))
    gaps = []
    for context in (500, 4000):
        parts = policy.assign(1000, context)
        assert (parts[0].start, parts[0].end, parts[1].end) == (context, parts[1].start, context + 1000)
        rows = [part.end - part.start for part in parts]
        policy.started(context, parts)
        assert max(policy.backlog_seconds().values()) == pytest.approx(max(model.chain_seconds(rows, (), context)))
        policy.ended(context, 0.0)
        gaps.append(rows[0] - rows[1])
    assert gaps[0] > 2 * gaps[1] > 0
    assert model.chain_seconds((500, 500), (), 4000)[-1] > 2 * model.chain_seconds((500, 500), (), 500)[-1]
    on_s_worker = LeastWaiting(Forecast(model), lambda num_tokens, context_len: 1e-2 * context_len, range(2))
    assert on_s_worker.assign(1000, 1) == ()
    assert on_s_worker.assign(1000, 400_000) != ()


@pytest.mark.parametrize("num_decoding", [0, 8])
def test_few_tokens_after_a_long_prefix_stay_with_the_s_worker(num_decoding: int) -> None:
    """Sending the prefix to a prefill worker takes 8 · 16 ms, which pays for 2,000 tokens, but not for few."""
    here = PrefillTimes(8, MeasuredSPart((1, 1000), (2e-4, 0.2), (0.0, 0.0)), PromptAttentionTimes(1e-9), 2048.0)
    forecast = Forecast(replace(here, link=PrefillLink(1e9)))
    policy = LeastWaiting(forecast, lambda n, context: here.alone_seconds(n, context_len=context), range(2))
    policy.begin_step(0.0, num_decoding=num_decoding)
    assert policy.assign(5, 8000) == ()
    assert len(policy.assign(2000, 8000)) == 2


def test_lost_workers_get_nothing_and_joined_ones_do() -> None:
    policy = LeastWaiting(Stub(), workers=range(2))
    policy.lost(0)
    policy.lost(5)
    assert workers_of(policy.assign(1000)) == [1]
    policy.joined(2)
    assert sorted(workers_of(policy.assign(1000))) == [1, 2]
    policy.started(1, policy.assign(1000))
    policy.lost(1)
    policy.lost(2)
    policy.ended(1, 3.0)
    assert policy.assign(1000) == ()


def test_the_forecast_takes_the_table_for_equal_workers_only() -> None:
    model = PrefillTimes(
        4, MeasuredSPart((100,), (0.1,), (0.0,)), PromptAttentionTimes(1e-9), 10.0, PrefillLink(1e9, 1e-4)
    )
    forecast = Forecast(model, PartitionTable([PartitionEntry(1000, (900, 100))]))
    assert forecast.parts(2000, (1.0, 1.05)) == (1800, 200)
    assert forecast.parts(2000, (1.0, 2.0)) != (1800, 200)
    assert sum(forecast.parts(2000, (1.0, 1.0, 1.0))) == 2000
    assert forecast.seconds((1000, 1000), (1.0, 1.0)) == model.chain_seconds((1000, 1000))
    tsp = Forecast(model, method="tsp")
    assert tsp.parts(1001, (1.0, 1.0)) == (501, 500)
    assert tsp.seconds((501, 500), (1.0, 1.0)) == (model.tsp_seconds((501, 500)),) * 2
