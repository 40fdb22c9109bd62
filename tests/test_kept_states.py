"""Kept states of hybrids: sequences that go on from one get the tokens that they get without."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.tiny_hybrids import built

from fastdecode import LLM, SamplingParams

pytestmark = pytest.mark.slow

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Qwen3-Next for long texts and return its folder."""
    root = tmp_path_factory.mktemp("kept")
    built("qwen3_next", max_position_embeddings=4096).save_pretrained(root)
    return root


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 256, "s_threads": 1, "r_threads": 1}
    kept = {"dtype": "float32", "kv_cache_memory": "32MiB", "block_size": BLOCK}
    return LLM(str(folder), **{**defaults, **kept, **settings})


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def hits(llm: LLM) -> int:
    return llm.engine.scheduler.statistics.prefix_hit_tokens


def text(length: int, seed: int) -> list[int]:
    return torch.randint(8, 120, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sharing(length: int, count: int) -> list[list[int]]:
    """Return prompts that begin with the same ``length`` tokens."""
    return [text(length, 1) + text(20 + 7 * number, 2 + number) for number in range(count)]


def plain(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    with make_llm(folder, enable_prefix_caching=False, **settings) as llm:
        tokens = run(llm, prompts)
        assert hits(llm) == 0
    return tokens


def test_prompts_that_begin_alike_go_on_from_where_they_part(folder: Path) -> None:
    """Together, all prompts but the first go on from there.

    One after the other, the second prompt stops there, and all later ones go on from it.
    """
    prompts = sharing(100, 4)
    full, expected = 100 // BLOCK * BLOCK, plain(folder, sharing(100, 4))
    with make_llm(folder) as llm:
        assert run(llm, prompts) == expected and hits(llm) == 3 * full
    with make_llm(folder, max_num_batched_tokens=41, max_num_seqs=4) as llm:
        assert [run(llm, [prompt])[0] for prompt in prompts] == expected and hits(llm) == 2 * full
        assert run(llm, prompts) == expected, "again"
        assert hits(llm) - 2 * full == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
        assert_nothing_held(llm.engine)


@pytest.mark.thorough
@pytest.mark.parametrize("at_once", [True, False])
def test_a_long_prefix_is_computed_once_for_sixteen(at_once: bool, folder: Path) -> None:
    """95 % of the prefix's full blocks are not computed again, also where it ends within a block."""
    for length in (2048, 2001):
        prompts, settings = sharing(length, 16), {"max_model_len": 2300, "block_size": 32, "max_num_seqs": 16}
        expected = plain(folder, prompts, **settings)
        with make_llm(folder, **settings) as llm:
            found = run(llm, prompts) if at_once else [run(llm, [prompt])[0] for prompt in prompts]
            assert found == expected and hits(llm) >= 0.95 * 15 * (length // 32 * 32)


def test_a_chat_goes_on_from_its_last_token(folder: Path) -> None:
    """The next turn goes on from all cached tokens of the last turn, which need not end with a block."""
    first = text(61, 9)
    with make_llm(folder) as llm:
        turn = [*first, *run(llm, [first])[0], *text(20, 8)]
        found = run(llm, [turn])
        assert hits(llm) == 61 + 19
        assert_nothing_held(llm.engine)
    assert found == plain(folder, [turn])


def test_what_was_preempted_goes_on_from_its_last_token(folder: Path) -> None:
    """A preempted sequence goes on, while decoding or in its prompt, if its room was not needed after all."""
    prompts = [text(length, length) for length in (90, 29)]
    expected = plain(folder, prompts)
    with make_llm(folder, max_num_batched_tokens=40, max_num_seqs=2) as llm:
        engine, tokens = llm.engine, {}
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY)
        for number in range(100):
            if not engine.has_unfinished_requests():
                break
            if number in (1, 12):
                (sequence, *_) = engine.scheduler.store.residents.all
                cached, computed = sequence.num_cached, len(sequence.output_token_ids)
                engine.scheduler.lifecycle.preempt(sequence)
                assert cached % BLOCK and bool(computed) == (number == 12)
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            assert number not in (1, 12) or sequence.num_cached > cached
        assert [tokens[number] for number in range(2)] == expected
        assert_nothing_held(engine)


@pytest.mark.thorough
def test_a_prefix_is_computed_again_where_its_r_worker_was_killed(folder: Path) -> None:
    prompts = sharing(100, 4)
    expected = plain(folder, prompts)
    with make_llm(folder, r_workers="spawn:2", max_num_batched_tokens=64, max_num_seqs=4) as llm:
        engine, tokens = llm.engine, {}
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY)
        killed = False
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            if not killed and len(tokens) == 4:
                victim = max(engine.scheduler.store.workers, key=lambda worker: len(worker.prefixes)).index
                os.kill(r_workers.spawned_pids(llm)[victim], signal.SIGKILL)
                killed = True
        assert killed and [tokens[number] for number in range(4)] == expected
        assert run(llm, prompts) == expected
        assert_nothing_held(engine)
