"""Prompts of prefill workers stored in ranges, or twice, over real sockets, give the tokens of one R-worker."""

from __future__ import annotations

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

from fastdecode import LLM, SamplingParams
from fastdecode.core.remote_prefill import RemotePrefill

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, detokenize=False, n=3)
MODEL: dict[str, Any] = {"max_model_len": 2048, "hf_overrides": {"max_position_embeddings": 4096}, "dtype": "bfloat16"}
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": "16MiB", **MODEL}
SETTINGS |= {"s_threads": 1, "r_threads": 1, "block_size": 16}
LENGTHS = (1500, 30, 505, 1010, 1024, 700)
PAIRS = {
    "two copies": {"kv_replicas": 2},
    "ranges": {"kv_shard_tokens": 512},
    "both": {"kv_replicas": 2, "kv_shard_tokens": 512},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def addresses(folder: Path) -> Iterator[str]:
    with prefill_workers.threads(folder, 3, **MODEL) as found:
        yield found


def batches() -> list[list[list[int]]]:
    """Return batches of texts: some, then some that continue these, and others."""
    first, longer = texts_that_grow(LENGTHS)
    return [first, longer, [text[::-1] for text in first]]


def params_of(number: int) -> SamplingParams:
    """Return sampling parameters; each third text is sampled, several times."""
    return SAMPLED if number % 3 == 0 else GREEDY


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[list[list[int]]]]:
    """Return the tokens of one R-worker without prefill workers."""
    with LLM(str(folder), r_workers="inproc:1", kv_shard_tokens=2048, **SETTINGS) as llm:
        return [Watched(llm).run(texts, params_of) for texts in batches()]


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param("both", marks=pytest.mark.slow),
        pytest.param("two copies", marks=pytest.mark.thorough),
        pytest.param("ranges", marks=pytest.mark.thorough),
    ],
)
def test_tokens_are_those_of_one_r_worker(
    folder: Path, addresses: str, wanted: list[list[list[list[int]]]], pair: str
) -> None:
    """Prompts with a kept prefix read it from all its R-workers, of which one is killed in the end."""
    with LLM(str(folder), r_workers="spawn:3", prefill_workers=addresses, **SETTINGS, **PAIRS[pair]) as llm:
        there = Watched(llm, range(3))
        assert [there.run(texts, params_of) for texts in batches()[:2]] == wanted[:2]
        assert any(each.prefix for each in there.handed)
        assert_stored_as(pair, there.handed)
        assert_nothing_held(llm.engine)
        there.handed.clear()
        kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
        assert there.run(batches()[2], params_of, {2: kill}) == wanted[2]
        assert pair != "two copies" or len(there.handed) == len(LENGTHS)  # Each sequence goes on with its other copy.
        assert_stored_as(pair, there.handed)
        assert_nothing_held(llm.engine)


def assert_stored_as(pair: str, handed: list[RemotePrefill]) -> None:
    """Assert that each prompt was stored at as many R-workers as its ranges and copies ask for."""
    assert handed
    for each in handed:
        ranges, places = {store.start for store in each.stores}, len(each.stores)
        long = len(each.token_ids) > 512
        assert (len(ranges) > 1) <= (long and pair != "two copies")
        assert len(ranges) <= places <= len(ranges) * (1 + (pair != "ranges"))
    assert any(len(each.stores) > 1 for each in handed)
    assert pair == "ranges" or any(
        len(each.stores) == 2 * len({store.start for store in each.stores}) for each in handed
    )
    assert pair == "two copies" or any(len({store.start for store in each.stores}) > 2 for each in handed)
