"""Sequences over several R-workers have the tokens of one R-worker, whatever runs, joins, leaves or is lost."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import model_zoo, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.examples import thinned
from helpers.recorded_texts import greedy_texts
from helpers.scheduler_harness import AMPLE, Job, Run

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import RequestError
from fastdecode.core.placing import Placing, choose_range_tokens, pool_holds
from fastdecode.core.step import ScheduledStep
from fastdecode.scheduler.policy.needs import place_segments

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
LENGTHS = (1500, 30, 505, 1010)
POSITIONS = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama"))


@cache
def prompts() -> list[list[int]]:
    """Return a prompt of three ranges of 512 tokens, a short one, and two that reach a border while they decode."""
    rng = random.Random(0)
    return [[rng.randrange(500) for _ in range(length)] for length in LENGTHS]


@cache
def reference() -> list[list[int]]:
    """Return transformers' outputs for the prompts."""
    return greedy_texts(model_zoo.build_model("llama-gqa", **POSITIONS), prompts(), NUM_TOKENS)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 2048, "kv_cache_memory": "16MiB"}
    threads = {"s_threads": 1, "r_threads": 1, "r_workers": "inproc:2", "kv_shard_tokens": 512}
    return LLM(str(folder), **{**defaults, **threads, "hf_overrides": POSITIONS, **settings})


def generate(llm: LLM, params: SamplingParams = GREEDY, texts: list[list[int]] | None = None) -> list[list[list[int]]]:
    """Return the token ids of all outputs of every prompt."""
    wanted = [{"prompt_token_ids": prompt} for prompt in texts or prompts()]
    return [[list(o.token_ids) for o in each.outputs] for each in llm.generate(wanted, params, use_tqdm=False)]


def is_sharded(llm: LLM) -> bool:
    return any(len(each.segments) > 1 for each in llm.engine.scheduler.snapshot().sequences.values())


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                {"r_workers": "inproc:4", "num_mini_batches": 2, "max_num_batched_tokens": 300},
                {"r_workers": "spawn:2", "num_mini_batches": 2},
                {"kv_shard_tokens": 1024, "prefill_scratch": "64MiB"},
                {"prefill_scratch": "64MiB", "max_num_batched_tokens": 700, "block_size": 256},
                {"schedule": "prefill-first", "r_workers": "inproc:3", "max_num_seqs": 2},
                {"speculative_config": NGRAM, "num_mini_batches": 2},
                {"kv_cache_memory": "900KiB", "r_workers": "inproc:3", "kv_shard_tokens": None},
            )
        ),
        pytest.param({"r_workers": "inproc:1"}, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param({"kv_load_limit": 3000, "r_workers": "inproc:3"}, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(folder: Path, settings: dict[str, Any]) -> None:
    """The tokens are transformers' under each of the settings.

    With 900 KiB, no R-worker could hold the longest sequence alone. The engine finds that out, and preempts sequences.
    """
    with make_llm(folder, **settings) as llm:
        seen = []
        llm.engine.on_step = lambda record: seen.append(is_sharded(llm))
        assert generate(llm) == [[tokens] for tokens in reference()]
        assert any(seen)
        assert_nothing_held(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_siblings_and_prefixes_share_closed_ranges(folder: Path, caching: bool) -> None:
    """Four samples share the three ranges of their prompt, and a longer prompt goes on from all of them."""
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, n=4)
    long = prompts()[0]
    longer = [*long, *prompts()[1]]
    found = []
    for spec in ("inproc:1", "inproc:3"):
        with make_llm(folder, r_workers=spec, enable_prefix_caching=caching) as llm:
            first = generate(llm, sampled, [long])
            before = llm.engine.scheduler.statistics
            found.append((first, generate(llm, GREEDY, [longer, longer[:1020]])))
            hits = llm.engine.scheduler.statistics.since(before).prefix_hit_tokens
            assert hits == (1472 + 992 if caching else 0)
            assert_nothing_held(llm.engine)
    assert found[0] == found[1] and len(found[0][0][0]) == 4
    with make_llm(folder, kv_shard_tokens=2048) as llm:
        assert (generate(llm, sampled, [long]), generate(llm, GREEDY, [longer, longer[:1020]])) == found[0]


class Counted:
    """Counts the prompt rows of all steps of an engine from now on."""

    def __init__(self, llm: LLM) -> None:
        self.rows = 0
        schedule = llm.engine.scheduler.schedule

        def counted(now: float = 0.0) -> ScheduledStep:
            step = schedule(now)
            self.rows += step.num_prompt_rows
            return step

        llm.engine.scheduler.schedule = counted  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param("closed", marks=pytest.mark.thorough), "tail"])
def test_only_the_lost_range_is_computed_again(folder: Path, victim: str) -> None:
    """One of three R-workers, with a closed range or the tail of the only sequence, ends by ``kill -9``."""
    prompt, wanted = prompts()[0], reference()[0]
    with make_llm(folder, r_workers="spawn:3", kv_cache_memory="2MiB") as llm:
        engine, counted, tokens, killed = llm.engine, Counted(llm), [], 0
        speeds = engine.scheduler.store.workers.speeds
        speeds.bandwidths[:] = 1.0  # The speeds are even, whatever else this machine did while they were measured.
        engine.add_request("0", prompt, GREEDY)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
            if len(tokens) == 5 and not killed:
                (sequence,) = engine.scheduler.snapshot().sequences.values()
                assert len(sequence.workers) == 3
                held = sequence.segments[1 if victim == "closed" else sequence.tail]
                killed = held.num_tokens
                os.kill(r_workers.spawned_pids(llm)[held.workers[0]], signal.SIGKILL)
        assert tokens == wanted
        assert counted.rows == len(prompt) + killed
        assert_nothing_held(engine)


def test_ranges_move_from_who_drains_and_to_who_joins(folder: Path) -> None:
    """One R-worker of three drains while four sequences decode: its ranges are copied, none computed again."""
    with make_llm(folder, r_workers="inproc:3") as llm:
        engine, counted, tokens = llm.engine, Counted(llm), {}
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, GREEDY)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            if len(tokens) == 4 and 0 in engine.scheduler.snapshot().accepting:
                engine.drain_r_worker(0)
        assert [tokens[number] for number in range(4)] == reference()
        assert engine.scheduler.snapshot().present == [1, 2] and counted.rows == sum(LENGTHS)
        assert_nothing_held(engine)


def test_an_aborted_sequence_leaves_nothing(folder: Path) -> None:
    with make_llm(folder, r_workers="inproc:3", max_num_batched_tokens=300) as llm:
        for num_steps in (1, 3, 8):
            for number, prompt in enumerate(prompts()):
                llm.engine.add_request(str(number), prompt, GREEDY)
            for _ in range(num_steps):
                llm.engine.step()
            llm.engine.abort_request([str(number) for number in range(4)])
            assert_nothing_held(llm.engine)


def test_what_no_pool_could_hold_is_refused(folder: Path) -> None:
    with make_llm(folder, kv_load_limit=1600, max_model_len=2048) as llm:
        with pytest.raises(RequestError, match=r"needs 3 ranges of 512 tokens, and .* have room for 2"):
            llm.generate([{"prompt_token_ids": prompts()[0]}], GREEDY, use_tqdm=False)
        assert generate(llm, GREEDY, [prompts()[1]]) == [[reference()[1]]]


@pytest.mark.parametrize(
    ("longest", "num_blocks", "balanced", "wanted"),
    [
        (100_000, [1000], None, None),
        (30_000, [1000, 1000], None, None),
        (40_000, [1000, 1000], None, 16_384),
        (60_000, [1000, 1000], None, 4096),
        (63_500, [1000, 1000], None, 1024),
        (64_000, [1000, 1000], None, None),
        (30_000, [1000, 1000], 100, 4096),
        (30_000, [1000, 1000], 9000, 16_384),
        (30_000, [1000, 1000], 50_000, None),
    ],
)
def test_range_lengths_that_are_chosen(longest: int, num_blocks: list[int], balanced: int, wanted: int | None) -> None:
    """Blocks have 32 tokens."""
    assert choose_range_tokens(longest, num_blocks, 32, balanced) == wanted


def test_what_a_pool_holds_finds_its_places() -> None:
    """Places are found for a prompt's ranges exactly where the pool is said to hold them.

    Siblings' copies of the last block may make the last range larger than the others.
    """
    rng, found = np.random.default_rng(0), 0
    for _ in range(2000):
        capacities = rng.integers(0, 12, rng.integers(2, 5)).repeat(2).reshape(-1, 2) * (1, 256)
        whole, last, siblings = (2, 512), int(rng.integers(1, 3)), int(rng.integers(0, 4))
        sizes = [(2, whole, 512)] * int(rng.integers(1, 6)) + [(last + siblings, whole, last * 256 - 1)]
        started = [(blocks, tokens) for blocks, _, tokens in sizes]
        wanted = pool_holds(started, capacities) and pool_holds([whole] * len(sizes), capacities)
        loads, endless = rng.random(len(capacities)), np.full(len(capacities), np.inf)
        places = place_segments(sizes, capacities[:, 0].copy(), capacities.copy(), loads, endless, np.ones(len(loads)))
        assert (places is not None) == wanted
        found += wanted and siblings + last > 2
        for worker, (blocks, _) in enumerate(capacities.tolist()):
            assert sum(size[0] for size, place in zip(sizes, places or (), strict=False) if place == worker) <= blocks
    assert found > 100


@pytest.mark.parametrize("num_workers", [2, 4])
def test_one_long_sequence_among_many_short_ones_lies_evenly(num_workers: int) -> None:
    """In every step the busiest R-worker attends at most a tenth more than the mean."""
    places = {"num_blocks": (1 << 16,) * num_workers, "bandwidths": (1.0,) * num_workers}
    limits = replace(AMPLE, max_num_seqs=80, max_model_len=40_000, placing=Placing(4096), scratch_tokens=0, **places)
    rng = np.random.default_rng(0)
    short = [Job([2] * int(rng.integers(100, 1500)), 99, [99]) for _ in range(64)]
    run = Run("sls", limits, [Job([1] * 32_768, 99, [99]), *short], recounts=False)
    run.arrive_and_abort()
    loads = [np.array(step.kv_loads) for step in (run.step() for _ in range(110)) if step.is_decode]
    assert len(loads) > 20 and all(each.max() <= 1.1 * each.mean() for each in loads)


def test_forecasts_say_where_tails_go_on() -> None:
    """Step by step, a tail grows to its end and then stays, and all R-workers take a part of later tails."""
    from fastdecode.scheduler.policy.load_forecast import LoadForecast

    cached, steps, workers = np.array([5, 7, 0]), np.array([9, 2, 12]), np.array([0, 1, 1])
    closed = (np.array([1, 0]), np.array([9, 9]))
    forecast = LoadForecast(workers, cached, steps, 2, 100, 8, closed)
    wanted = np.zeros((2, 13))
    for step in range(13):
        for worker, tokens, left in zip(workers, cached, steps, strict=True):
            if step < left:
                wanted[worker, step] += min(8, tokens + 1 + step)
                wanted[:, step] += max(0, tokens + 1 + step - 8) / 2
        wanted[:, step] += 8 * (step < 9)
    np.testing.assert_allclose(forecast.loads, wanted)


def has_two_copies(llm: LLM) -> bool:
    """Return whether all sequences decode, and every range with tokens has a second copy."""
    known = llm.engine.scheduler.snapshot()
    segments = [each for sequence in known.sequences.values() for each in sequence.segments if each.num_tokens]
    return not known.prompts and bool(segments) and all(len(each.workers) == 2 for each in segments)


@pytest.mark.slow
@pytest.mark.parametrize("victim", thinned([0, 1, 2], 3, 1))
def test_a_range_that_another_has_is_not_computed_again(
    folder: Path, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three R-workers with two copies is killed, and at most the last rows are computed again."""
    # All second copies are made in the first steps.
    monkeypatch.setattr("fastdecode.scheduler.policy.second_copies.SHARE", 100.0)
    with make_llm(folder, r_workers="spawn:3", kv_replicas=2, max_num_batched_tokens=2048) as llm:
        engine, counted, killed = llm.engine, Counted(llm), False
        texts: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, GREEDY)
        while engine.has_unfinished_requests():
            texts |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step()}
            if not killed and has_two_copies(llm):
                killed = True
                os.kill(r_workers.spawned_pids(llm)[victim], signal.SIGKILL)
        assert killed, "not every range got its second copy"
        assert [texts[str(number)] for number in range(len(prompts()))] == reference()
        assert counted.rows <= sum(LENGTHS) + 2 * len(LENGTHS)
        assert_nothing_held(engine)
