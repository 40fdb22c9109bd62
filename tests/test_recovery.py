"""R-workers are killed with ``kill -9`` while sequences decode: no sequence is lost, and no token differs."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL, thinned
from helpers.scheduler_harness import Job, Run

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import WorkerLostError
from fastdecode.scheduler import Limits

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
NAME = "llama-gqa"


def expected() -> list[list[int]]:
    """Return what transformers generates."""
    return [list(tokens[:24]) for tokens in model_zoo.reference(NAME).tokens]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("llama"))


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "r_threads": 1}
    return LLM(str(folder), **{**defaults, "kv_cache_memory": "64MiB", "r_workers": "spawn:3", **settings})


def run_and_kill(llm: LLM, prompts: list[list[int]], kill_after_tokens: int, victim: int) -> list[list[int]]:
    """Return the token ids of all prompts; R-worker ``victim`` is killed once so many tokens are out."""
    engine, tokens, killed = llm.engine, {}, False
    process = r_workers.spawned_pids(llm)[victim]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not killed and sum(map(len, tokens.values())) >= kill_after_tokens:
            os.kill(process, signal.SIGKILL)
            killed = True
    assert killed
    return [tokens[number] for number in range(len(prompts))]


SETTINGS: list[dict[str, Any]] = [
    {"enable_prefix_caching": False, "num_mini_batches": 2},
    {"max_num_batched_tokens": 40, "max_num_seqs": 24, "schedule": "stall-free"},
    {"schedule": "prefill-first", "num_mini_batches": 2},
]


@pytest.mark.parametrize("settings", thinned(SETTINGS, 3), ids=str)
def test_every_sequence_gets_the_tokens_it_would_have_had(folder: Path, settings: dict[str, Any]) -> None:
    """One of the three R-workers of 16 sequences is killed in their prompts, early, or late.

    ``make test`` has one moment for each of the settings.
    """
    prompts = model_zoo.prompts(NAME) * 2
    wanted = expected() * 2
    rng = random.Random(str(settings))
    moments = [1, rng.randrange(60, 200), rng.randrange(200, 360)]
    for moment in moments if SEES_ALL else [moments[SETTINGS.index(settings)]]:
        with make_llm(folder, **settings) as llm:
            records = []
            llm.engine.on_step = records.append
            assert run_and_kill(llm, prompts, moment, rng.randrange(3)) == wanted
            assert sum(record.lost_workers for record in records) == 1
            assert_nothing_held(llm.engine)


KV_BYTES = {"float32": 768, "float16": 384, "bfloat16": 384, "int8": 240, "int4": 168}
"""The bytes of one token of the model by KV dtype."""

LONG = replace(GREEDY, max_tokens=48 if SEES_ALL else 32)
SAMPLED = SamplingParams(
    temperature=0.8, seed=7, max_tokens=40 if SEES_ALL else 28, ignore_eos=True, detokenize=False, n=4
)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "enable_prefix_caching"),
    [
        pytest.param("bfloat16", "auto", True, marks=pytest.mark.thorough),
        pytest.param("float16", "auto", False, marks=pytest.mark.thorough),
        ("bfloat16", "int8", True),
        pytest.param("float16", "int4", False, marks=pytest.mark.thorough),
        pytest.param("float32", "bfloat16", True, marks=pytest.mark.thorough),
    ],
)
def test_sixteen_bits_and_quantised_caches_are_computed_again_bit_by_bit(
    folder: Path, dtype: str, kv_cache_dtype: str, enable_prefix_caching: bool
) -> None:
    """A kill, other cuts of the prompts and preemptions change no token, greedy or sampled with n = 4.

    Attention has to have the same bits on an R-worker and on the S-worker, and for any number of rows together. Rounded
    to 16 bits, a difference in the last place of one key soon becomes another token.
    """
    names = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "enable_prefix_caching": enable_prefix_caching}
    prompts = model_zoo.prompts(NAME) * 2

    def run(kill_at: int | None = None, **settings: Any) -> tuple[dict[str, list[list[int]]], int]:
        with make_llm(folder, **{**names, **settings}) as llm:
            found, step = {}, 0
            for number, prompt in enumerate(prompts):
                llm.engine.add_request(str(number), prompt, SAMPLED if number % 4 == 0 else LONG)
            while llm.engine.has_unfinished_requests():
                for output in llm.engine.step():
                    found[output.request_id] = [list(each.token_ids) for each in output.outputs]
                step += 1
                if step == kill_at:
                    os.kill(r_workers.spawned_pids(llm)[1], signal.SIGKILL)
            return found, llm.engine.scheduler.statistics.preemptions

    wanted, _ = run()
    kill_at = random.Random(dtype + kv_cache_dtype).randrange(2, 40 if SEES_ALL else 24)
    assert run(kill_at, num_mini_batches=2)[0] == wanted
    small = (600 if SEES_ALL else 480) * KV_BYTES[dtype if kv_cache_dtype == "auto" else kv_cache_dtype]
    others, preemptions = run(
        r_workers="inproc:1",
        prefill_scratch="64MiB",
        kv_cache_memory=small,
        max_num_batched_tokens=48,
        max_num_seqs=40,
        schedule="stall-free",
    )
    assert others == wanted and preemptions > 0


@pytest.mark.thorough
@pytest.mark.parametrize("enable_prefix_caching", thinned([False, True], 2, 1))
def test_prompts_that_are_preempted_leave_the_scratch(folder: Path, enable_prefix_caching: bool) -> None:
    """The S-worker keeps the prompts that the scheduler counts, and preempted sequences get the same tokens."""
    prompts = [[5, 6, number] for number in range(6)] + [list(range(180)), list(range(100, 250))]
    params = replace(GREEDY, max_tokens=100)

    def run(**settings: Any) -> tuple[dict[str, list[int]], int]:
        found: dict[str, list[int]] = {}
        first: dict[int, int] = {}
        again: set[int] = set()
        without_output: set[int] = set()
        names = {"enable_prefix_caching": enable_prefix_caching, "schedule": "stall-free", "r_workers": "inproc:1"}
        with make_llm(folder, **names, **settings) as llm:
            engine = llm.engine
            for number, prompt in enumerate(prompts):
                engine.add_request(str(number), prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    found[output.request_id] = list(output.outputs[0].token_ids)
                known = engine.scheduler.snapshot()
                kept = set(engine.world.s_worker.prompts.sequence_ids)
                assert kept <= {each for each in known.prompts if known.sequences[each].uses_scratch}
                again |= without_output & {*known.waiting, *known.following}
                sizes = {each: known.sequences[each].num_tokens for each in known.prompts}
                without_output = {each for each, size in sizes.items() if size == first.setdefault(each, size)}
            assert_nothing_held(engine)
        return found, len(again)

    small = {"kv_cache_memory": 36 * 16 * KV_BYTES["float32"], "prefill_scratch": 25 * 16 * KV_BYTES["float32"]}
    tokens, num_preempted_prompts = run(**small, max_num_batched_tokens=8, max_num_seqs=8)
    assert tokens == run()[0]
    assert num_preempted_prompts > 0


def test_two_of_three_may_go_and_work_goes_on(folder: Path) -> None:
    prompts, wanted = model_zoo.prompts(NAME), expected()
    with make_llm(folder) as llm:
        assert run_and_kill(llm, prompts, 50, 0) == wanted
        assert run_and_kill(llm, prompts, 60, 0) == wanted  # The victim is the first of the two that are left.
        assert [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == wanted


def test_losing_the_last_one_is_one_clear_error(folder: Path) -> None:
    with make_llm(folder, r_workers="spawn:1", wait_for_r_workers=0) as llm:
        llm.engine.add_request("a", [1, 2, 3], GREEDY)
        llm.engine.step()
        os.kill(r_workers.spawned_pids(llm)[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="SIGKILL, and no other R-worker is left"):
            while llm.engine.has_unfinished_requests():
                llm.engine.step()


def test_scoring_goes_to_a_worker_that_is_left(folder: Path) -> None:
    """The first of two R-workers is lost, and the second gives the same log-probabilities."""
    prompts = model_zoo.prompts(NAME)
    with make_llm(folder, r_workers="spawn:2") as llm:
        wanted = llm.engine.score(prompts[0])
        run_and_kill(llm, prompts[:4], 20, 0)
        assert (llm.engine.score(prompts[0]) == wanted).all()


def test_what_no_remaining_worker_can_hold_ends_alone() -> None:
    """The lost R-worker alone had room for the large request; the small ones end as usual."""
    limits = Limits(8, 64, 1, 1000, 200, 4, (4, 40), (1.0, 1.0), prefix_caching=False)
    run = Run("sls", limits, [Job([1] * 50, 30, [30]), Job([2] * 3, 9, [9]), Job([3] * 3, 9, [9])])
    run.arrive_and_abort()
    for _ in range(4):
        run.step()
    assert [sequence.sequence_id for sequence in run.lose(1)] == [0]
    run.step_number += 1
    run.to_the_end()
    assert [len(group[0].output_token_ids) for group in run.members[1:]] == [9, 9]
