"""Greedy output equals transformers' ``generate`` token by token, for any batch, chunks and placement."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import model_zoo, r_workers
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL, thinned

from fastdecode import LLM, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
SHORT = replace(GREEDY, max_tokens=24)


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves an architecture once and returns its folder."""
    root = tmp_path_factory.mktemp("zoo")

    @cache
    def folder(name: str) -> Path:
        return model_zoo.save_model(name, root / name)

    return folder


def made(folder: Path, **settings: Any) -> LLM:
    """Return an LLM with one thread of each kind, unless ``settings`` say otherwise."""
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 512, "kv_cache_memory": "256MiB"}
    return LLM(str(folder), **{**defaults, "s_threads": 1, "r_threads": 1, **settings})


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the token ids of every prompt, and check that nothing stays behind."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(
    folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **settings: Any
) -> list[list[int]]:
    """Return the token ids of every prompt from an engine of its own."""
    with made(folder, **settings) as llm:
        return generated(llm, prompts, params)


def expected(name: str, count: int = 64) -> list[list[int]]:
    """Return the first tokens that transformers generates for each prompt."""
    return [list(tokens[:count]) for tokens in model_zoo.reference(name).tokens]


def reschedule(llm: LLM, **limits: Any) -> None:
    """Let an idle engine go on within other limits."""
    scheduler = llm.engine.scheduler
    llm.engine.replace_scheduler(scheduler.with_limits(replace(scheduler.limits, **limits)))


@pytest.mark.parametrize("name", model_zoo.ARCHITECTURES)
def test_every_architecture_matches_generate(name: str, zoo_folder: Any) -> None:
    """All prompts in one batch match, with 2 and 3 mini-batches.

    The prompts attend on the S-worker too. ``make test-all`` adds 1 mini-batch, as nearly all other tests have, and all
    64 tokens.
    """
    with made(zoo_folder(name), prefill_scratch="64MiB") as llm:
        room = llm.engine.scheduler.limits.scratch_tokens
        assert room > max(map(len, model_zoo.prompts(name)))
        runs = ((2, room, 64), (3, 0, 64), (1, 0, 64)) if SEES_ALL else ((2, room, 16), (3, 0, 4))
        for num_mini_batches, scratch_tokens, count in runs:
            reschedule(llm, num_mini_batches=num_mini_batches, scratch_tokens=scratch_tokens)
            params = replace(GREEDY, max_tokens=count)
            assert generated(llm, model_zoo.prompts(name), params) == expected(name, count), num_mini_batches


VARIATIONS: dict[str, dict[str, Any]] = {
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 24},
    "tiny chunks beside decodes": {"max_num_batched_tokens": 9, "max_num_seqs": 8, "num_mini_batches": 2},
    "two at a time": {"max_num_seqs": 2, "max_num_batched_tokens": 64},
    "block of 16": {"block_size": 16, "num_mini_batches": 2},
    "block of 128": {"block_size": 128},
    "prompts attend on the R-worker": {"prefill_scratch": 1, "max_num_batched_tokens": 64, "max_num_seqs": 16},
    "prompts attend on the S-worker": {"prefill_scratch": "64MiB", "max_num_batched_tokens": 64, "max_num_seqs": 16},
    "three R-workers": {
        "r_workers": "inproc:3",
        "num_mini_batches": 2,
        "max_num_batched_tokens": 100,
        "max_num_seqs": 16,
    },
    "two R-worker processes": {"r_workers": "spawn:2", "num_mini_batches": 2, "max_num_batched_tokens": 100}
    | {"max_num_seqs": 16, "r_threads": 1},
    "three R threads": {"r_threads": 3},
    "two S threads": {"s_threads": 2},
}


@pytest.mark.parametrize(
    ("name", "variation"),
    [
        pytest.param(name, variation, marks=[pytest.mark.thorough] * ((i - j) % 3 > 0 or j % 2 > 0))
        for i, name in enumerate(["llama-gqa", "gemma2", "gpt_oss"])
        for j, variation in enumerate(VARIATIONS)
    ],
)
def test_same_tokens_however_it_is_run(name: str, variation: str, zoo_folder: Any) -> None:
    """No mini-batches, threads, block size, chunk size, placement or other requests change a token."""
    tokens = generate(zoo_folder(name), model_zoo.prompts(name), SHORT, **VARIATIONS[variation])
    assert tokens == expected(name, SHORT.max_tokens)


def test_listening_workers_give_the_same_tokens(zoo_folder: Any) -> None:
    """Two processes over TCP get prompts in chunks."""
    with r_workers.listening() as (_, first), r_workers.listening() as (_, second):
        settings = {"r_workers": f"{first},{second}", "kv_cache_memory": None, "r_threads": None}
        settings |= {"num_mini_batches": 2, "max_num_batched_tokens": 64, "max_num_seqs": 16}
        tokens = generate(zoo_folder("gemma2"), model_zoo.prompts("gemma2"), SHORT, **settings)
        assert tokens == expected("gemma2", SHORT.max_tokens)


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_matches(isa: str, name: str, zoo_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instruction set of the R-worker gives the reference's tokens."""
    from fastdecode import _rworker

    if isa not in _rworker.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    assert generate(zoo_folder(name), model_zoo.prompts(name), SHORT) == expected(name, SHORT.max_tokens)


def test_alone_as_in_a_crowd(zoo_folder: Any) -> None:
    """A prompt alone has the tokens that it has among others."""
    tokens = generate(zoo_folder("mistral"), model_zoo.prompts("mistral")[:1], SHORT)
    assert tokens == expected("mistral", SHORT.max_tokens)[:1]


DENSE = [name for name in model_zoo.ARCHITECTURES if name not in model_zoo.ROUTED]
"""Models without a router; where two experts nearly tie, bfloat16 picks either, and the logits jump."""


@pytest.mark.parametrize("name", thinned(DENSE, 6))
def test_bfloat16_differs_only_between_near_ties(name: str, zoo_folder: Any) -> None:
    """After each token of our text, each side's choice is among the other's best ten of 512, and mostly equal."""
    theirs = model_zoo.load_model(name, torch.bfloat16)
    params = replace(GREEDY, logprobs=10, max_tokens=64 if SEES_ALL else 24)
    with made(zoo_folder(name), dtype="bfloat16") as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in model_zoo.prompts(name)]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    same = []
    for prompt, mine in zip(model_zoo.prompts(name), outputs, strict=True):
        best = model_zoo.reference_logits(theirs, prompt, list(mine.token_ids)).topk(10).indices.tolist()
        assert mine.logprobs is not None and len(mine.logprobs) == len(best) == params.max_tokens
        for token, logprobs, ten in zip(mine.token_ids, mine.logprobs, best, strict=True):
            assert token in ten and ten[0] in logprobs
            same.append(token == ten[0])
    assert sum(same) > (0.9 if SEES_ALL else 0.85) * len(same)  # Fewer tokens vary more by chance.


@pytest.mark.parametrize("name", thinned(model_zoo.ARCHITECTURES, 3, 1))
def test_every_architecture_matches_with_drafts(name: str, zoo_folder: Any) -> None:
    """1 to 8 drafts, three in ten of them wrong, match over 1 to 3 mini-batches and R-workers."""
    number, prompts, wanted = list(model_zoo.ARCHITECTURES).index(name), model_zoo.prompts(name), expected(name)
    num_drafts, r_workers = 1 + number % 8, f"inproc:{1 + number // 3 % 3}"
    settings = {"r_workers": r_workers, "num_mini_batches": 1 + number % 3, "block_size": 16}
    speculative = {"method": "ngram", "num_speculative_tokens": num_drafts}
    params = GREEDY if SEES_ALL else replace(GREEDY, max_tokens=32)
    with made(zoo_folder(name), speculative_config=speculative, **settings) as llm:
        always_draft(llm.engine, Clairvoyant(dict(zip(map(tuple, prompts), wanted, strict=True)), error=0.3))
        assert generated(llm, prompts, params) == [tokens[: params.max_tokens] for tokens in wanted]
        counts = llm.engine.scheduler.statistics.drafts
    assert 0.2 < counts.num_accepted_tokens / counts.num_draft_tokens < 0.9
    assert len(counts.num_accepted_tokens_per_pos) == num_drafts
