"""Prompts of prefill workers in 16 bits and quantised caches have the bits that the S-worker would compute."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, prefill_workers, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL
from helpers.prefill_workers import AnyParts

from fastdecode import LLM, SamplingParams

NAME = "llama-gqa"
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 512, "block_size": 16}
SETTINGS |= {"kv_cache_memory": "64MiB", "s_threads": 1, "r_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, detokenize=False, n=4)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("zoo") / NAME)


BOTH = "bfloat16", "float16"


@pytest.fixture(scope="module", params=[BOTH[0], pytest.param(BOTH[1], marks=pytest.mark.thorough)])
def workers(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Yield a dtype, and the addresses of three prefill workers that compute in it, for one test after another."""
    with prefill_workers.threads(folder, 3, dtype=request.param) as addresses:
        yield request.param, addresses


def each_once(values: Sequence[Any], names: str) -> pytest.MarkDecorator:
    """Parametrize: ``make test`` has every other value with bfloat16, ``make test-all`` all with both dtypes."""
    return pytest.mark.parametrize(
        ("workers", names),
        [
            pytest.param(dtype, value, marks=[pytest.mark.thorough] * (i % 2 > 0 or dtype != BOTH[0]))
            for i, value in enumerate(values)
            for dtype in BOTH
        ],
        indirect=["workers"],
    )


class Watched:
    """An engine that runs batches of the zoo's prompts; ``cached`` has prompts' bytes as R-workers store them."""

    def __init__(self, llm: LLM, policy: AnyParts | None = None) -> None:
        self.llm, self.engine, self.policy = llm, llm.engine, policy
        if policy:
            self.engine.scheduler.remote_prompts.policy = policy
        self.cached: dict[int, bytes] = {}

    def run(self, prompts: list[list[int]], kill_at: int = 0, sampled: bool = False) -> list[list[list[int]]]:
        """Return the tokens of all prompts; before step ``kill_at``, if any, an R-worker is killed."""
        first = len(self.cached)
        for number, prompt in enumerate(prompts):
            self.engine.add_request(str(number), prompt, SAMPLED if sampled and number % 4 == 0 else GREEDY)
        found: dict[int, list[list[int]]] = {}
        steps = 0
        while self.engine.has_unfinished_requests():
            steps += 1
            if steps == kill_at:
                os.kill(r_workers.spawned_pids(self.llm)[1], signal.SIGKILL)
            for output in self.engine.step():
                found[int(output.request_id)] = [list(each.token_ids) for each in output.outputs]
            if not kill_at and not sampled:
                self._look(prompts, first)
        return [found[number] for number in range(len(prompts))]

    def _look(self, prompts: list[list[int]], first: int) -> None:
        """Keep the cached bytes of sequences that have begun to decode."""
        for sequence in self.engine.scheduler.store.residents.decoding.values():
            number = first + [list(each) for each in prompts].index(list(sequence.prompt_token_ids))
            if number not in self.cached:
                tail = sequence.tail
                data = self.engine.backend.export(tail.home, tail.cache_id, 0, len(sequence.prompt_token_ids))
                self.cached[number] = data.tobytes()


@each_once(["auto", "int8", "int4"], "kv_cache_dtype")
def test_caches_and_tokens_are_those_of_the_s_worker(
    folder: Path, workers: tuple[str, str], kv_cache_dtype: str
) -> None:
    """Chains of one to three workers run twice; the second time half of each prompt is a kept prefix.

    ``make test`` has chains of one and three.
    """
    dtype, addresses = workers
    prompts = model_zoo.prompts(NAME)
    longer = [[*prompt, *prompts[0][: 20 + 7 * index]] for index, prompt in enumerate(prompts)]
    settings = {**SETTINGS, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    with LLM(str(folder), prefill_scratch="64MiB", **settings) as llm:
        alone = Watched(llm)
        wanted = [alone.run(prompts), alone.run(longer)]
        assert llm.engine.scheduler.statistics.prefix_hit_tokens > 0
    with LLM(str(folder), prefill_workers=addresses, **settings) as llm:
        for size in (1, 2, 3) if SEES_ALL else (1, 3):
            there = Watched(llm, AnyParts([0, 1, 2], seed=size, sizes=(size,)))
            assert [there.run(prompts), there.run(longer)] == wanted
            assert len(there.policy.started_jobs) == 2 * len(prompts)
            assert there.cached == alone.cached
            llm.engine.reset_prefix_cache()
        assert llm.engine.scheduler.statistics.prefix_hit_tokens > 0
        assert_nothing_held(llm.engine)


@each_once([("auto", 2), ("int4", 1)], "stored")
def test_a_killed_r_worker_changes_no_token(folder: Path, workers: tuple[str, str], stored: tuple[str, int]) -> None:
    """After kill -9 in the prompts or later, rows of prefill workers are computed again, there or here.

    ``make test`` has only the later kill.
    """
    (dtype, addresses), (kv_cache_dtype, kv_replicas) = workers, stored
    prompts = model_zoo.prompts(NAME) * 2
    settings = {**SETTINGS, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    with LLM(str(folder), **settings) as llm:
        wanted = Watched(llm).run(prompts, sampled=True)
    rng = random.Random(f"{dtype} {kv_cache_dtype} {kv_replicas}")
    moments = rng.randrange(2, 8), rng.randrange(8, 24)
    for kill_at in moments if SEES_ALL else moments[kv_replicas - 1 :][:1]:
        more = {"r_workers": "spawn:3", "kv_replicas": kv_replicas, "prefill_workers": addresses}
        with LLM(str(folder), **settings, **more) as llm:
            there = Watched(llm, AnyParts([0, 1, 2], seed=kill_at, least=rng.choice((1, 60))))
            assert there.run(prompts, kill_at, sampled=True) == wanted
            assert_nothing_held(llm.engine)


@pytest.mark.thorough
def test_preemptions_change_no_token(folder: Path, workers: tuple[str, str]) -> None:
    """Preempted prompts are computed again on either side."""
    dtype, addresses = workers
    prompts = model_zoo.prompts(NAME) * 2
    settings = {**SETTINGS, "dtype": dtype, "enable_prefix_caching": False}
    with LLM(str(folder), **settings) as llm:
        wanted = Watched(llm).run(prompts, sampled=True)
        token_bytes = llm.engine.s_model.layout.kv_bytes_per_token
    small = {"r_workers": "inproc:1", "kv_cache_memory": 600 * token_bytes, "max_num_seqs": 40}
    with LLM(str(folder), prefill_workers=addresses, **{**settings, **small}) as llm:
        there = Watched(llm, AnyParts([0, 1, 2], least=60))
        assert there.run(prompts, sampled=True) == wanted
        assert llm.engine.scheduler.statistics.preemptions > 0
        assert_nothing_held(llm.engine)
