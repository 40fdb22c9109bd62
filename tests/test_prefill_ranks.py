"""Prompts of prefill workers beside two ranks: each rank's R-worker gets its KV heads, and tokens stay the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, prefill_workers, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.prefill_workers import Watched, texts_that_grow
from helpers.processes import children_of

from fastdecode import LLM, SamplingParams

MODEL: dict[str, Any] = {"max_model_len": 2048, "hf_overrides": {"max_position_embeddings": 4096}}
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": "32MiB", **MODEL}
SETTINGS |= {"s_threads": 1, "r_threads": 1, "block_size": 16}
LENGTHS = (1100, 30, 205)
HF_OVERRIDES = json.dumps(MODEL["hf_overrides"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def addresses(folder: Path) -> Iterator[str]:
    with prefill_workers.threads(folder, 2, **MODEL) as found:
        yield found


def params_of(number: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[list[list[int]]]]:
    """Return the tokens of one rank with one R-worker, without prefill workers."""
    with LLM(str(folder), r_workers="inproc:1", kv_shard_tokens=2048, **SETTINGS) as llm:
        return [Watched(llm).run(texts, params_of) for texts in texts_that_grow(LENGTHS)]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_tokens_are_those_of_one_rank(folder: Path, addresses: str, wanted: list[list[list[list[int]]]]) -> None:
    """Prompts are stored in ranges with two copies, and begin with kept prefixes.

    Then R-workers of either rank and a prefill worker are killed while prompts are computed.
    """
    with (
        prefill_workers.process(folder, "--max-model-len", "2048", "--hf-overrides", HF_OVERRIDES) as (mortal, last),
        LLM(
            str(folder), tensor_parallel_size=2, r_workers="spawn:4", kv_shard_tokens=512, kv_replicas=2,
            prefill_workers=f"{addresses},{last}", **SETTINGS,
        ) as llm,
    ):  # fmt: skip
        there = Watched(llm, range(3))
        assert [there.run(texts, params_of) for texts in texts_that_grow(LENGTHS)] == wanted
        assert any(each.prefix for each in there.handed) and any(len(each.stores) > 2 for each in there.handed)
        assert len(there.computed) == len(there.handed)  # No connection to an R-worker failed.
        assert_nothing_held(llm.engine)
        (rank,) = children_of(os.getpid(), "tensor_parallel.process")
        here, theirs = r_workers.spawned_pids(llm), children_of(rank, "r-worker")
        for victim in (theirs[1], here[2], mortal.pid):
            there.handed.clear()
            killed: list[int] = []
            befalls = dict.fromkeys(range(2, 100), partial(kill_while_under_way, there, victim, killed))
            assert there.run(texts_that_grow(LENGTHS)[0], params_of, befalls) == wanted[0]
            assert killed == [victim]
            assert_nothing_held(llm.engine)
        assert len(llm.engine.scheduler.snapshot().present) == 2
        assert len(llm.engine.scheduler.remote_prompts.policy.workers) == 2


def kill_while_under_way(there: Watched, victim: int, killed: list[int]) -> None:
    """Kill ``victim`` once, before the step after the one that sent prompts out.

    On a loaded machine the prompts may be computed by then.
    """
    if there.handed and not killed:
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)
