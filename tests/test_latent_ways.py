"""Latent rows, rows that an index picks, and chunks give the tokens of ``generate`` in every configuration."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from helpers import latent_zoo, model_zoo, prefill_workers, r_workers, sparse_zoo
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL
from helpers.prefill_workers import Watched

from fastdecode import LLM, SamplingParams

NUM_TOKENS = 64 if SEES_ALL else 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
RANGES, COPIES = {"kv_shard_tokens": 512}, {"kv_replicas": 2}
CHUNKS = {"prefill_scratch": 1, "max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 64}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
THERE = {"latent_absorption": "r"}
WAYS: dict[str, dict[str, Any]] = {
    "in chunks": CHUNKS,
    "on the S-worker": {"prefill_scratch": "16MiB", "r_threads": 2},
    "ranges": RANGES,
    "copies": COPIES,
    "ranges, copies": RANGES | COPIES,
    "kill -9": {},
    "kill -9, ranges, copies": RANGES | COPIES,
    "prefill workers": RANGES,
    "drafts": DRAFTS,
    "drafts, ranges, copies": DRAFTS | RANGES | COPIES,
    "ranks": {"tensor_parallel_size": 2},
    "absorbed by R-workers": THERE | CHUNKS,
    "absorbed by R-workers, on the S-worker": THERE | {"prefill_scratch": "16MiB", "r_threads": 2},
    "absorbed by R-workers, kill -9, ranges, copies": THERE | RANGES | COPIES,
    "absorbed by R-workers, ranges": THERE | RANGES,
    "absorbed by R-workers, copies": THERE | COPIES,
    "absorbed by R-workers, drafts": THERE | DRAFTS,
    "absorbed by R-workers, prefill workers": THERE | RANGES,
    "absorbed by R-workers, ranks": THERE | {"tensor_parallel_size": 2},
}
PARTS = ("ranks", "absorbed by R-workers, ranges")
"""Configurations that `make test` skips, since others include them."""
NUMBERS = [(workers, mini_batches) for workers in (1, 2, 3) for mini_batches in (1, 2, 3)]
CHUNKED = "llama4_text"
SPARSE = (*sparse_zoo.CONFIGS, CHUNKED)
NO_LATENTS = ("minimax_m3", CHUNKED)


class ChunkedZoo:
    """Llama 4 with chunks of 64 tokens; the prompts have up to nine chunks."""

    prompts = staticmethod(sparse_zoo.prompts)

    @staticmethod
    def build_model(name: str) -> Any:
        return model_zoo.build_model(name, max_position_embeddings=1024, attention_chunk_size=64)


def zoo(name: str) -> Any:
    """Return the zoo that has the architecture's tiny model and its prompts."""
    return ChunkedZoo if name == CHUNKED else sparse_zoo if name in SPARSE else latent_zoo


def pairs() -> Iterator[Any]:
    """Yield every architecture in every configuration; ``make test`` has each at least once, for latent rows only."""
    names, ways = list(latent_zoo.CONFIGS), list(WAYS)
    for i, name in enumerate(names):
        for j, way in enumerate(ways):
            is_drawn = (i + j) % len(names) == 3 and j % 2 == 0 and way not in PARTS
            marks = [pytest.mark.slow] if is_drawn else [pytest.mark.thorough]
            yield pytest.param(name, way, marks=() if is_drawn and way == "ranges" else marks, id=f"{name}-{way}")
    for name in SPARSE:
        for way in (way for way in ways if "absorbed" not in way or name not in NO_LATENTS):
            yield pytest.param(name, way, marks=pytest.mark.thorough, id=f"{name}-{way}")


def numbers(way: str, seed: int, extent: str) -> list[tuple[int, int]]:
    """Return pairs of numbers of R-workers and of mini-batches.

    ``extent`` says whether these are all pairs, each number once or twice, or one pair.
    """
    least = 2 if {"copies", "kill"} & set(way.replace(",", "").split()) else 1
    able = [pair for pair in NUMBERS if pair[0] >= least and ("ranks" not in way or pair[0] < 3)]
    if extent == "each":
        workers = sorted({pair[0] for pair in able})
        return [(workers[(seed + i) % len(workers)], 1 + (seed // 3 + i) % 3) for i in range(3)]
    return able if extent == "all" else [able[seed % len(able)]]


def extent(name: str, way: str) -> str:
    """Return whether each number is run (sparse models, absorbing R-workers) or all pairs."""
    if not SEES_ALL:
        return "one"
    return "each" if name in SPARSE or "absorbed" in way else "all"


@cache
def folder(name: str, root: Path) -> Path:
    """Save the architecture's tiny model and return its folder."""
    zoo(name).build_model(name).save_pretrained(root / name)
    return root / name


def tokens_of(llm: LLM, name: str, befalls: dict[int, Callable[[], object]]) -> list[list[int]]:
    found = Watched(llm).run(zoo(name).prompts(), lambda _: GREEDY, befalls)
    assert_nothing_held(llm.engine)
    return [each[0] for each in found]


def run(name: str, way: str, root: Path, num_workers: int, num_mini_batches: int) -> list[list[int]]:
    """Return the tokens of all prompts."""
    settings = latent_zoo.SETTINGS | WAYS[way] | {"num_mini_batches": num_mini_batches}
    if name in SPARSE:
        settings["block_size"] = 16
    kind = "spawn" if "kill" in way else "inproc"
    if "ranks" in way:
        num_workers *= 2
    with LLM(str(folder(name, root)), **settings, r_workers=f"{kind}:{num_workers}") as llm:
        layers = llm.engine.s_model.layout.layers
        if name not in SPARSE:
            assert {(each.num_kv_heads, each.key_head_dim, each.stored_value_dim) for each in layers} == {(1, 40, 0)}
            assert {each.num_heads for each in layers} == {2 if "ranks" in way else 4}
        if "absorbed" in way:
            assert {each.output_dim for each in layers if not each.ranks_tokens} == {12}
        if "drafts" in way:
            guessed = dict(zip(map(tuple, zoo(name).prompts()), proven(name, root), strict=True))
            always_draft(llm.engine, Clairvoyant(guessed, error=0.3))
        tokens = tokens_of(llm, name, kills(llm, "copies" in way) if "kill" in way else {})
        assert ("drafts" in way) == (llm.engine.scheduler.statistics.drafts.num_accepted_tokens > 0)
    return tokens


def kills(llm: LLM, has_copies: bool) -> dict[int, Callable[[], object]]:
    """Return kills by step: one R-worker in the prompts; without copies, a second of three in the decodes."""
    first, *_, last = r_workers.spawned_pids(llm)
    befalls = {3: partial(os.kill, last, signal.SIGKILL)}
    if len(r_workers.spawned_pids(llm)) == 3 and not has_copies:
        befalls[14] = partial(os.kill, first, signal.SIGKILL)
    return befalls


def run_with_prefill_workers(
    name: str, way: str, root: Path, num_workers: int, num_mini_batches: int
) -> list[list[int]]:
    place = folder(name, root)
    settings = latent_zoo.SETTINGS | WAYS[way] | {"num_mini_batches": num_mini_batches}
    with (
        prefill_workers.threads(place, 2, max_model_len=1024) as addresses,
        LLM(str(place), **settings, r_workers=f"inproc:{num_workers}", prefill_workers=addresses) as llm,
    ):
        there = Watched(llm, range(2))
        found = there.run(zoo(name).prompts(), lambda _: GREEDY)
        assert there.computed
        assert_nothing_held(llm.engine)
    return [each[0] for each in found]


@pytest.mark.parametrize(("name", "way"), list(pairs()))
def test_every_architecture_in_every_way(name: str, way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp() / "latent_models"
    attempt = partial(run_with_prefill_workers if "prefill workers" in way else run, name, way)
    for pair in numbers(way, len(name) + len(way), extent(name, way)):
        assert attempt(root, *pair) == proven(name, root), pair


@cache
def proven(name: str, root: Path) -> list[list[int]]:
    """Return the tokens of one R-worker, which must equal those of ``generate``."""
    with LLM(str(folder(name, root)), **latent_zoo.SETTINGS) as llm:
        tokens = tokens_of(llm, name, {})
    assert sum(len(set(each)) > NUM_TOKENS / 3 for each in tokens) >= 7  # One text may repeat itself.
    model = zoo(name).build_model(name)
    texts = zip(zoo(name).prompts(), tokens, strict=True)
    assert [model_zoo.disagreements(model, *pair) for pair in texts] == [0] * 8
    return tokens
