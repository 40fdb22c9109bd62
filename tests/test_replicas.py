"""Two copies of every sequence (``--kv-replicas 2``): a lost R-worker costs no token and no recomputation."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, r_workers
from helpers.engine_checks import assert_nothing_held

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.core.metrics import StepRecord

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=32, ignore_eos=True, detokenize=False, n=4)
NAME = "llama-gqa"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("llama"))


def expected() -> list[list[int]]:
    """Return what transformers generates."""
    return [list(tokens[:32]) for tokens in model_zoo.reference(NAME).tokens]


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "r_threads": 1}
    defaults |= {"kv_cache_memory": "64MiB", "r_workers": "spawn:3", "kv_replicas": 2}
    return LLM(str(folder), **{**defaults, **settings})


class Watched:
    """A batch run step by step; every fourth request is sampled with n = 4, the others are greedy."""

    def __init__(self, llm: LLM, prompts: list[list[int]], sampled: bool = True) -> None:
        self.llm, self.engine = llm, llm.engine
        self.records: list[StepRecord] = []
        self.found: dict[int, list[list[int]]] = {}
        self.engine.on_step = self.records.append
        for number, prompt in enumerate(prompts):
            params = SAMPLED if sampled and number % 4 == 0 else GREEDY
            self.engine.add_request(str(number), prompt, params)

    def go_on(self, num_steps: int = 1000, until_copied: bool = False) -> None:
        """Run so many steps, or until the batch has ended or every sequence has two copies."""
        while num_steps and self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self.found[int(output.request_id)] = [list(each.token_ids) for each in output.outputs]
            num_steps -= 1
            if until_copied and self.engine.scheduler.snapshot().pool.once == 0:
                return

    def kill(self, victim: int) -> None:
        """Kill an R-worker with ``kill -9``."""
        os.kill(r_workers.spawned_pids(self.llm)[victim], signal.SIGKILL)


@pytest.mark.slow
def test_two_losses_one_after_the_other_cost_no_token_and_no_prefill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second loss comes once all have two copies again; no step after the prompts has a prompt's row."""
    # All second copies are made in the first steps.
    monkeypatch.setattr("fastdecode.scheduler.policy.second_copies.SHARE", 100.0)
    prompts, wanted = model_zoo.prompts(NAME)[:6], expected()[:6]
    with make_llm(folder, num_mini_batches=2, enable_prefix_caching=False) as llm:
        batch = Watched(llm, prompts, sampled=False)
        while llm.engine.scheduler.snapshot().prompts or not batch.records:
            batch.go_on(1)
        assert llm.engine.scheduler.snapshot().pool[1:] == (0, len(prompts))
        num_before = len(batch.records)
        batch.kill(1)
        batch.go_on(2)
        assert llm.engine.scheduler.snapshot().pool.once > 0
        batch.go_on(until_copied=True)
        assert llm.engine.scheduler.snapshot().pool[1:] == (0, len(prompts))
        batch.kill(0)
        batch.go_on()
        assert sum(record.lost_workers for record in batch.records) == 2
        assert all(record.is_decode for record in batch.records[num_before:])
        assert [batch.found[number][0] for number in range(len(prompts))] == wanted
        assert_nothing_held(llm.engine)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("bfloat16", "auto"), ("float32", "int4")])
def test_prefix_hits_siblings_and_seeds_go_on_from_the_other_copy(
    folder: Path, dtype: str, kv_cache_dtype: str
) -> None:
    """Tokens are those of one copy without a loss, in 16 bits and quantised; the second batch begins with hits."""
    prompts = model_zoo.prompts(NAME)
    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    with make_llm(folder, r_workers="inproc:1", kv_replicas=1, **settings) as llm:
        (undisturbed := Watched(llm, prompts)).go_on()
    with make_llm(folder, **settings) as llm:
        (first := Watched(llm, prompts)).go_on()
        second = Watched(llm, prompts)
        second.go_on(20)
        second.kill(2)
        second.go_on()
        assert llm.engine.scheduler.statistics.prefix_hit_tokens > 0
        assert first.found == second.found == undisturbed.found
        assert_nothing_held(llm.engine)


def test_a_drain_of_sequences_with_two_copies_moves_nothing(folder: Path) -> None:
    """Sequences stay where their other copies are, and get a new second copy."""
    prompts = model_zoo.prompts(NAME)
    with make_llm(folder, r_workers="inproc:3") as llm:
        batch = Watched(llm, prompts, sampled=False)
        batch.go_on(until_copied=True)
        llm.engine.drain_r_worker(0)
        batch.go_on(1)
        assert llm.engine.scheduler.snapshot().present == [1, 2]
        batch.go_on()
        assert [batch.found[number][0] for number in range(len(prompts))] == expected()


def test_two_copies_need_two_r_workers(folder: Path) -> None:
    with pytest.raises(ConfigError, match="two copies need two R-workers"):
        make_llm(folder, r_workers="inproc:1")
