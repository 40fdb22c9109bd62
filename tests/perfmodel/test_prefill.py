"""Seconds to the first token of a shared prompt, beside the definition and the KV-Runahead paper's own counts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.partition import even
from fastdecode.perfmodel.prefill_rates import gpu_prefill_model
from fastdecode.perfmodel.prefill_times import (
    PrefillLink,
    PrefillTimes,
    PromptAttentionTimes,
    chain_traffic_tokens,
    triangle_pairs,
    tsp_traffic_tokens,
)
from fastdecode.perfmodel.presets import find_gpu
from fastdecode.perfmodel.stages import MeasuredSPart

S_PART = MeasuredSPart((1, 4096), (1e-3, 1.0), (0.5, 0.5))


def model(**more: Any) -> PrefillTimes:
    given = {"num_layers": 4, "s_part": S_PART, "attention": PromptAttentionTimes(1e-7), "kv_bytes": 8192.0}
    return PrefillTimes(**given | more)


parts_of_prompts = st.lists(st.integers(1, 500), min_size=1, max_size=5).map(tuple)


def defined_seconds(prefill: PrefillTimes, parts: tuple[int, ...], speeds: tuple[float, ...], context: int) -> float:
    """Return when the last worker ends, by recursion over (worker, layer) as in the docstring's picture.

    Worker -1 holds the prefix.
    """
    ends = [context + sum(parts[: worker + 1]) for worker in range(len(parts))] + [context]

    @functools.cache
    def has(worker: int, layer: int) -> float:
        if worker < 0:
            return 0.0
        own = done(worker, layer - 1) + seconds(worker).before
        return max(own, crossed(worker - 1, layer) + prefill.link.latency_seconds) if worker or context else own

    @functools.cache
    def crossed(worker: int, layer: int) -> float:
        before = crossed(worker, layer - 1) if layer else 0.0
        stored = prefill.kv_bytes if prefill.stored_kv_bytes is None else prefill.stored_kv_bytes
        num_bytes = (ends[worker] - context) * prefill.kv_bytes + context * stored
        return max(before, has(worker, layer)) + num_bytes / prefill.link.bytes_per_second

    @functools.cache
    def done(worker: int, layer: int) -> float:
        return has(worker, layer) + seconds(worker).attention + seconds(worker).after if layer >= 0 else 0.0

    def seconds(worker: int) -> Any:
        return prefill.part_seconds(parts[worker], ends[worker] - parts[worker], speeds[worker])

    last = len(parts) - 1
    return prefill.job_seconds + done(last, prefill.num_layers - 1) + prefill.s_part.head_seconds(1) / speeds[last]


@given(parts_of_prompts, st.sampled_from((0, 0, 1, 700)), st.data())
def test_a_chain_takes_as_long_as_its_definition_says(
    parts: tuple[int, ...], context: int, data: st.DataObject
) -> None:
    speeds = tuple(data.draw(st.floats(0.25, 4)) for _ in parts)
    link = PrefillLink(data.draw(st.floats(1e6, 1e12)), data.draw(st.floats(0, 0.1)))
    stored = data.draw(st.sampled_from((None, 2112.0)))
    attention = PromptAttentionTimes(1e-6, 64)
    prefill = model(link=link, job_seconds=0.25, attention=attention, stored_kv_bytes=stored)
    wanted = defined_seconds(prefill, parts, speeds, context)
    assert prefill.chain_seconds(parts, speeds, context)[-1] == pytest.approx(wanted)


def test_one_worker_computes_everything_in_turn() -> None:
    alone = 4 * (S_PART.layer_seconds(1000) + 1e-7 * triangle_pairs(1000, 1)) + 0.5
    assert model().alone_seconds(1000) == pytest.approx(alone)
    assert model().alone_seconds(1000, speed=2.0) == pytest.approx(alone / 2)
    assert model().tsp_seconds((1000,)) == pytest.approx(4 * (S_PART.layer_seconds(1000) + 0.1) + 0.5)


def test_a_prefix_travels_as_the_cache_stores_it() -> None:
    """A prefix crosses the link in the cache's dtype: int4 has 88 + 72 bytes per head of 128, bfloat16 256 each."""
    shape, slow = BUILT_IN["mistral-7b"], PrefillLink(1e9)
    whole, stored = (gpu_prefill_model(shape, find_gpu("a100"), slow, dtype) for dtype in ("auto", "int4"))
    assert (whole.stored_kv_bytes, stored.stored_kv_bytes) == (2 * 8 * 256, 8 * (88 + 72))
    waits = [each.chain_seconds((64,), (), 100_000)[0] for each in (whole, stored)]
    assert waits[1] < 0.35 * waits[0]
    assert whole.chain_seconds((64, 64)) == stored.chain_seconds((64, 64))


def test_two_workers_by_hand() -> None:
    """Layers take 2 (1 before attention), attention almost nothing, and the link 3; so the link sets the pace."""
    flat = MeasuredSPart((100,), (2.0,), (0.0,))
    prefill = PrefillTimes(3, flat, PromptAttentionTimes(1e-12), 1.0, PrefillLink(100 / 3, 0.5), before_share=0.5)
    # Worker 0 has k, v of layers 0, 1, 2 at 1, 3, 5; they have crossed at 4.5, 7.5, 10.5; then attention and 1 more.
    assert prefill.chain_seconds((100, 100)) == pytest.approx((6.0, 11.5))
    # A prefix of 50 tokens takes 1.5 a layer: it is there at 2, 3.5, 5, and worker 0 attends at 2, 4, 6. What it passes
    # on takes 4.5 a layer, and is there at 7, 11.5, 16.
    assert prefill.chain_seconds((100, 100), context_len=50) == pytest.approx((7.0, 17.0))
    # TSP: 1 before, 3.5 round the ring, 1 after, three times.
    assert prefill.tsp_seconds((100, 100)) == pytest.approx(16.5)


def test_counts_of_the_papers_example() -> None:
    """Section 4.1 of the paper: for 9 tokens KVR computes at most 21 dot products and 22 entries, TSP 27 and 36."""
    whole_squares = PromptAttentionTimes(1.0, tile_rows=9)
    assert [whole_squares.pairs(*part) for part in ((4, 0), (3, 4), (2, 7))] == [16, 21, 18]
    assert 2 * chain_traffic_tokens((4, 3, 2)) == 22
    assert whole_squares.square_seconds(3, 9) == 27
    assert 2 * tsp_traffic_tokens((3, 3, 3)) == 36
    assert chain_traffic_tokens((4, 3, 2), context_len=10) == 14 + 17


@given(st.integers(1, 64), st.integers(1, 8))
def test_even_chains_move_half_of_an_all_gather(length: int, num_workers: int) -> None:
    parts = even(length * num_workers, num_workers)
    assert 2 * chain_traffic_tokens(parts) == tsp_traffic_tokens(parts)


@given(parts_of_prompts, st.integers(1, 300))
def test_tiles_compute_at_least_the_triangle_and_less_than_a_tile_more(parts: tuple[int, ...], tile: int) -> None:
    for rows in parts:
        causal = rows * (rows + 1) / 2
        assert causal <= triangle_pairs(rows, tile) <= causal + rows * (tile - 1)
        assert triangle_pairs(rows, 1) == causal
    brute = sum(min(parts[0], (row // tile + 1) * tile) for row in range(parts[0]))
    assert triangle_pairs(parts[0], tile) == brute


@pytest.mark.parametrize(
    "make",
    [
        lambda: PromptAttentionTimes(0.0),
        lambda: PromptAttentionTimes(1.0, 0),
        lambda: PrefillLink(0.0),
        lambda: PrefillLink(1.0, float("inf")),
        lambda: model(num_layers=0),
        lambda: model(before_share=1.5),
    ],
)
def test_impossible_figures_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
