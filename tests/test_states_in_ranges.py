"""Recurrent layers with sequences in ranges: each range keeps a state, and the next one begins from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_checks import assert_nothing_held
from helpers.tiny_hybrids import random_prompts, save_with_texts

from fastdecode import LLM, SamplingParams

NUM_TOKENS = 24
RANGE = 512
PROMPTS = random_prompts((1100, 500, 30, 1024))
"""Prompts that fill two ranges and begin a third, that grow into a second range, that fit in one, and that end with a
range."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a tiny model of a type, with what transformers generates by it."""
    root = tmp_path_factory.mktemp("hybrids")

    @cache
    def save(model_type: str) -> tuple[Path, list[list[int]]]:
        folder = root / model_type
        return folder, save_with_texts(folder, model_type, PROMPTS, NUM_TOKENS, max_position_embeddings=2048)

    return save


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1280, "s_threads": 1, "r_threads": 1}
    defaults |= {"dtype": "float32", "kv_cache_memory": "32MiB", "max_num_seqs": 8, "block_size": 16}
    defaults |= {"kv_shard_tokens": RANGE, "r_workers": "inproc:3"}
    if settings.get("state_on") == "s":
        settings.setdefault("state_memory", "512MiB")
    return LLM(str(folder), **{**defaults, **settings})


def generated(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], GREEDY, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_next", {"state_on": "s"}),
        ("lfm2", {"state_on": "s", "num_mini_batches": 2}),
        ("falcon_h1", {"state_on": "s", "max_num_batched_tokens": 200}),
        ("qwen3_next", {"r_workers": "spawn:3", "num_mini_batches": 2}),
        ("lfm2", {"max_num_batched_tokens": 300}),
        ("falcon_h1", {}),
    ],
)
def test_tokens_are_those_of_generate(model_type: str, settings: dict[str, Any], saved: Any) -> None:
    folder, expected = saved(model_type)
    with make_llm(folder, **settings) as llm:
        assert generated(llm) == expected
