"""Partitions of a prompt: whole, in order, and as good as every other one where all can be tried."""

from __future__ import annotations

import itertools

import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.partition import (
    PartitionEntry,
    PartitionTable,
    balanced,
    closed_form,
    even,
    of_fractions,
    searched,
)
from fastdecode.perfmodel.prefill_times import PrefillLink, PrefillTimes, PromptAttentionTimes
from fastdecode.perfmodel.stages import MeasuredSPart

models = st.builds(
    PrefillTimes,
    num_layers=st.integers(1, 6),
    s_part=st.floats(1e-4, 1e-1).map(lambda seconds: MeasuredSPart((1, 100), (seconds, 20 * seconds), (0.0, 0.0))),
    attention=st.builds(PromptAttentionTimes, st.floats(1e-7, 1e-3), st.sampled_from((1, 16))),
    kv_bytes=st.just(1.0),
    link=st.builds(PrefillLink, st.floats(1e3, 1e9), st.floats(0, 1e-2)),
)
lengths, counts = st.integers(1, 4000), st.integers(1, 8)


def check(parts: tuple[int, ...], num_tokens: int, num_workers: int) -> None:
    assert len(parts) == num_workers
    assert sum(parts) == num_tokens
    assert min(parts) >= (1 if num_tokens >= num_workers else 0)


@given(models, lengths, counts, st.data())
@settings(max_examples=examples(60))
def test_parts_cover_the_prompt(model: PrefillTimes, num_tokens: int, num_workers: int, data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=num_workers, max_size=num_workers))
    fractions = [speed / sum(speeds) for speed in speeds]
    check(even(num_tokens, num_workers), num_tokens, num_workers)
    check(of_fractions(num_tokens, fractions), num_tokens, num_workers)
    for context in (0, data.draw(st.integers(1, 10_000))):
        check(closed_form(model, num_tokens, num_workers, speeds, context), num_tokens, num_workers)
    check(balanced(model, num_tokens, num_workers), num_tokens, num_workers)


@given(models, st.integers(8, 400), st.integers(2, 3))
@settings(max_examples=examples(40), deadline=None)
def test_a_search_is_never_worse_than_even_parts(model: PrefillTimes, num_tokens: int, num_workers: int) -> None:
    def seconds(parts: tuple[int, ...]) -> float:
        return model.chain_seconds(parts)[-1]

    found = searched(seconds, closed_form(model, num_tokens, num_workers))
    check(found, num_tokens, num_workers)
    assert seconds(found) <= seconds(even(num_tokens, num_workers))
    assert seconds(found) <= seconds(closed_form(model, num_tokens, num_workers))


def best_of_all(model: PrefillTimes, num_tokens: int, num_workers: int, speeds: tuple[float, ...]) -> float:
    """Return the time of the best partition, found by trying all."""
    cuts = itertools.combinations(range(1, num_tokens), num_workers - 1)
    ends = [(0, *each, num_tokens) for each in cuts]
    return min(
        model.chain_seconds([b - a for a, b in itertools.pairwise(each)], speeds)[-1] for each in ends
    )  # fmt: skip


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("pair_seconds", [1e-5, 1e-3])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 0.5, 1.5)])
def test_a_search_finds_the_best_of_all(num_workers: int, pair_seconds: float, speeds: tuple[float, ...]) -> None:
    s_part = MeasuredSPart((1, 100), (1e-3, 0.1), (0.0, 0.0))
    model = PrefillTimes(4, s_part, PromptAttentionTimes(pair_seconds), 1.0, PrefillLink(1e4))
    speeds = speeds[:num_workers]
    start = closed_form(model, 40, num_workers, speeds)
    found = searched(lambda parts: model.chain_seconds(parts, speeds)[-1], start)
    best = best_of_all(model, 40, num_workers, speeds)
    assert model.chain_seconds(found, speeds)[-1] == pytest.approx(best, rel=0.01)
    if model.chain_seconds(even(40, num_workers), speeds)[-1] > 1.05 * best:
        assert found != even(40, num_workers)


@pytest.mark.parametrize("num_workers", [2, 4, 8])
@pytest.mark.parametrize("context", [0, 2048, 16384])
def test_the_closed_form_comes_near_a_search(num_workers: int, context: int) -> None:
    """The closed form is within 5 % of a search for a 7B model's times, and cuts more evenly after a longer prefix."""
    s_part = MeasuredSPart((1, 1024), (1.5e-3, 7e-3), (0.0, 0.0))
    model = PrefillTimes(32, s_part, PromptAttentionTimes(6e-10), 16384, PrefillLink(100e9))
    formed = closed_form(model, 8192, num_workers, context_len=context)
    found = searched(lambda parts: model.chain_seconds(parts, (), context)[-1], formed, least_stride=32)
    best, ours = (model.chain_seconds(parts, (), context)[-1] for parts in (found, formed))
    assert ours <= 1.05 * best
    if not context:
        assert ours <= 1.05 * model.chain_seconds(balanced(model, 8192, num_workers))[-1]
    assert ours < model.chain_seconds(even(8192, num_workers), (), context)[-1]
    assert formed[0] - formed[-1] <= (lambda plain: plain[0] - plain[-1])(closed_form(model, 8192, num_workers))
    # The paper says "the earlier processes need to consume more contexts".
    assert list(formed) == sorted(formed, reverse=True)


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_balanced_parts_know_what_attention_computes_in_vain(num_workers: int) -> None:
    """With masked squares and a least time per layer, the bisection beats the closed form and is near a search."""
    s_part = MeasuredSPart((1, 1024, 2048), (3e-3, 3e-3, 5e-3), (0.0, 0.0, 0.0))
    model = PrefillTimes(32, s_part, PromptAttentionTimes(6e-10, 1 << 20), 16384, PrefillLink(300e9))
    even_seconds, formed, ours = (
        model.chain_seconds(parts)[-1]
        for parts in (
            even(16384, num_workers),
            closed_form(model, 16384, num_workers),
            balanced(model, 16384, num_workers),
        )
    )
    assert ours <= formed < even_seconds
    found = searched(lambda parts: model.chain_seconds(parts)[-1], balanced(model, 16384, num_workers), 32, 128)
    assert ours <= 1.02 * model.chain_seconds(found)[-1]


def test_a_faster_worker_gets_more() -> None:
    model = PrefillTimes(8, MeasuredSPart((100,), (0.1,), (0.0,)), PromptAttentionTimes(1e-9), 1.0)
    slow_first, fast_first = (closed_form(model, 900, 2, speeds) for speeds in ((1.0, 2.0), (2.0, 1.0)))
    assert slow_first[0] == pytest.approx(300, abs=40)
    assert fast_first[0] == pytest.approx(600, abs=40)


def test_a_search_measures_no_parts_twice_and_few() -> None:
    """For two workers the search is binary, not a scan."""
    calls = []

    def measure(parts: tuple[int, ...]) -> float:
        calls.append(parts)
        return abs(parts[0] - 2741)

    assert searched(measure, even(4096, 2), least_stride=1) == (2741, 1355)
    assert len(calls) == len(set(calls)) < 50


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[PartitionEntry], int]:
    num_workers = draw(st.integers(1, 5))
    at = draw(st.lists(st.integers(num_workers, 20_000), min_size=1, max_size=5, unique=True))
    cuts = [draw(st.lists(st.floats(0.05, 1), min_size=num_workers, max_size=num_workers)) for _ in at]
    entries = [PartitionEntry(n, of_fractions(n, [part / sum(c) for part in c])) for n, c in zip(at, cuts, strict=True)]
    return entries, num_workers


@given(tables(), lengths)
def test_a_table_is_exact_at_its_entries_and_between_neighbours_elsewhere(
    made: tuple[list[PartitionEntry], int], num_tokens: int
) -> None:
    entries, num_workers = made
    table = PartitionTable(entries)
    assert table.knows(num_workers) and not table.knows(num_workers + 1)
    for entry in entries:
        assert table.parts(entry.num_tokens, num_workers) == entry.parts
    parts = table.parts(num_tokens, num_workers)
    check(parts, num_tokens, num_workers)
    if num_tokens < num_workers:
        return
    near = sorted(entries, key=lambda entry: entry.num_tokens)
    low = max((e for e in near if e.num_tokens <= num_tokens), key=lambda e: e.num_tokens, default=near[0])
    high = min((e for e in near if e.num_tokens >= num_tokens), key=lambda e: e.num_tokens, default=near[-1])
    for index, part in enumerate(parts):
        ends = sorted((low.fractions[index], high.fractions[index]))
        slack = (1 + num_workers) / num_tokens
        assert ends[0] - slack <= part / num_tokens <= ends[1] + slack


def test_the_papers_interpolation() -> None:
    """The fractions for 10k tokens lie halfway between those for 8k and for 12k."""
    table = PartitionTable([PartitionEntry(8000, (5000, 3000)), PartitionEntry(12000, (6600, 5400))])
    assert table.parts(10000, 2) == (5875, 4125)
    assert table.parts(16000, 2) == (8800, 7200)
    assert table.parts(4000, 2) == (2500, 1500)


@pytest.mark.parametrize(("num_tokens", "parts"), [(10, ()), (10, (5, 4)), (10, (10, 0)), (10, (11, -1))])
def test_entries_that_are_no_partition_are_refused(num_tokens: int, parts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="add up"):
        PartitionEntry(num_tokens, parts)


def test_a_length_may_not_stand_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        PartitionTable([PartitionEntry(10, (5, 5)), PartitionEntry(10, (6, 4))])
