"""Greedy output equals transformers' ``generate`` token by token, whatever the batch, the chunks and the placement."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import model_zoo, r_workers
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held

from fastdecode import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves each architecture once and returns its folder."""
    root = tmp_path_factory.mktemp("zoo")

    @cache
    def folder(name: str) -> Path:
        return model_zoo.save_model(name, root / name)

    return folder


def generate(
    folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **settings: Any
) -> list[list[int]]:
    """Token ids of every prompt, and the check that nothing stays behind."""
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "kv_cache_memory": "256MiB",
        "s_threads": 1,
        "r_threads": 1,
    }
    with LLM(str(folder), **{**defaults, **settings}) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert_nothing_held(llm.engine)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", model_zoo.ARCHITECTURES)
def test_every_architecture_matches_generate(name: str, zoo_folder: Any) -> None:
    """All prompts in one batch, with 1, 2 and 3 mini-batches; the prompts attend on the S-worker too."""
    expected = [list(tokens) for tokens in model_zoo.reference(name).tokens]
    for num_mini_batches, scratch in ((1, None), (2, "64MiB"), (3, None)):
        settings = {"num_mini_batches": num_mini_batches, "prefill_scratch": scratch}
        tokens = generate(zoo_folder(name), model_zoo.prompts(name), **settings)
        assert tokens == expected, settings


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


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt_oss"])
def test_same_tokens_however_it_is_run(name: str, variation: str, zoo_folder: Any) -> None:
    """Mini-batches, threads, block size, chunk size, placement and company change no token."""
    expected = [list(tokens[:24]) for tokens in model_zoo.reference(name).tokens]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    assert generate(zoo_folder(name), model_zoo.prompts(name), params, **VARIATIONS[variation]) == expected


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_listening_workers_give_the_same_tokens(num_mini_batches: int, zoo_folder: Any) -> None:
    """Two processes over TCP, with prompts in chunks."""
    expected = [list(tokens) for tokens in model_zoo.reference("gemma2").tokens]
    with r_workers.listening() as (_, first), r_workers.listening() as (_, second):
        settings = {"r_workers": f"{first},{second}", "kv_cache_memory": None, "r_threads": None}
        settings |= {"num_mini_batches": num_mini_batches, "max_num_batched_tokens": 64, "max_num_seqs": 16}
        assert generate(zoo_folder("gemma2"), model_zoo.prompts("gemma2"), **settings) == expected


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_matches(isa: str, name: str, zoo_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path of the R-worker gives the reference's tokens."""
    from fastdecode import _rworker

    if isa not in _rworker.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    expected = [list(tokens) for tokens in model_zoo.reference(name).tokens]
    assert generate(zoo_folder(name), model_zoo.prompts(name)) == expected


def test_alone_as_in_a_crowd(zoo_folder: Any) -> None:
    """One prompt by itself."""
    prompts, reference = model_zoo.prompts("mistral"), model_zoo.reference("mistral")
    assert generate(zoo_folder("mistral"), prompts[:1]) == [list(reference.tokens[0])]


DENSE = [name for name in model_zoo.ARCHITECTURES if name not in ("mixtral", "qwen3_moe", "gpt_oss")]
"""Without a router: where two experts nearly tie, bfloat16 picks either, and the logits jump."""


@pytest.mark.parametrize("name", DENSE)
def test_bfloat16_differs_only_between_near_ties(name: str, zoo_folder: Any) -> None:
    """After each token of our text each side's choice is among the other's best ten of 512, and mostly the same."""
    theirs = model_zoo.load_model(name, torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False, logprobs=10)
    with LLM(str(zoo_folder(name)), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512, s_threads=1) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in model_zoo.prompts(name)]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    same = []
    for prompt, mine in zip(model_zoo.prompts(name), outputs, strict=True):
        best = model_zoo.reference_logits(theirs, prompt, list(mine.token_ids)).topk(10).indices.tolist()
        assert mine.logprobs is not None and len(mine.logprobs) == len(best) == 64
        for token, logprobs, ten in zip(mine.token_ids, mine.logprobs, best, strict=True):
            assert token in ten and ten[0] in logprobs
            same.append(token == ten[0])
    assert sum(same) > 0.9 * len(same)


@pytest.mark.parametrize("name", model_zoo.ARCHITECTURES)
def test_every_architecture_matches_with_drafts(name: str, zoo_folder: Any) -> None:
    """Right drafts and wrong ones, from 1 to 8 of them, over 1 to 3 mini-batches and R-workers."""
    number = list(model_zoo.ARCHITECTURES).index(name)
    check_drafts(name, zoo_folder(name), 1 + number % 8, num_mini_batches=1 + number % 3, r_workers=1 + number // 3 % 3)


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_any_number_of_drafts(num_drafts: int, zoo_folder: Any) -> None:
    check_drafts("llama-gqa", zoo_folder("llama-gqa"), num_drafts, num_mini_batches=2, r_workers=2)


def check_drafts(name: str, folder: Path, num_drafts: int, num_mini_batches: int, r_workers: int) -> None:
    """Tokens equal transformers' though three in ten drafts are wrong."""
    prompts, expected = model_zoo.prompts(name), [list(tokens) for tokens in model_zoo.reference(name).tokens]
    drafter = Clairvoyant(dict(zip(map(tuple, prompts), expected, strict=True)), error=0.3)
    settings = {"num_mini_batches": num_mini_batches, "r_workers": f"inproc:{r_workers}", "block_size": 16}
    settings |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": num_drafts}}
    with LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=512, kv_cache_memory="64MiB", s_threads=1, r_threads=1,
        **settings,
    ) as llm:  # fmt: skip
        always_draft(llm.engine, drafter)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
        counts = llm.engine.scheduler.statistics.drafts
        assert_nothing_held(llm.engine)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert 0.2 < counts.num_accepted_tokens / counts.num_draft_tokens < 0.9
    assert len(counts.num_accepted_tokens_per_pos) == num_drafts
