"""Every family of recurrences for 64 tokens × 8 prompts, whatever happens to the states."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.tiny_hybrids import random_prompts, save_with_texts

from fastdecode import LLM, SamplingParams

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]

NUM_TOKENS = 64
PROMPTS = random_prompts((70, 1, 30, 29, 2, 45, 16, 17))
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
MODEL_TYPES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "nemotron_h", "granitemoehybrid",
    "bamba", "falcon_h1", "zamba2", "mamba2", "jamba", "zamba", "mamba", "falcon_mamba", "minimax", "recurrent_gemma",
    "lfm2", "lfm2_moe", "lfm3", "bailing_hybrid",
)  # fmt: skip
OF_STATES_ALONE = ("mamba2", "mamba", "falcon_mamba")
"""Model types in which no layer attends."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_those_of_generate(model_type: str, tmp_path: Path) -> None:
    """Tokens equal ``generate``'s with states on R-workers and with the S-worker.

    There are 1 to 3 R-workers and mini-batches, chunks of odd lengths, too little memory, and an R-worker that dies.
    """
    expected = save_with_texts(tmp_path, model_type, PROMPTS, NUM_TOKENS)
    ways: list[dict[str, Any]] = [
        {"r_workers": "spawn:3", "num_mini_batches": 2, "max_num_batched_tokens": 37},
        {"r_workers": "inproc:2", "num_mini_batches": 3, "max_num_batched_tokens": 13},
        small_memory(tmp_path) | {"num_mini_batches": 1, "max_num_batched_tokens": 11, "schedule": "stall-free"},
    ]
    here = {"state_on": "s", "state_memory": "1GiB"}
    if model_type not in OF_STATES_ALONE:
        ways += [each | here for each in ways[:2]]
        ways += [small_memory(tmp_path, here) | {"num_mini_batches": 1, "schedule": "stall-free"}]
    for settings in ways:
        with make_llm(tmp_path, **settings) as llm:
            assert texts(llm, kills="spawn" in settings.get("r_workers", "")) == expected, settings
            assert llm.engine.scheduler.lifecycle.num_preemptions > 0 or "kv_cache_memory" not in settings


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 144, "s_threads": 1, "r_threads": 1}
    defaults |= {"max_num_seqs": 8, "dtype": "float32", "kv_cache_memory": "16MiB", "block_size": 16}
    return LLM(str(folder), **{**defaults, **settings})


def small_memory(folder: Path, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return settings with room for three sequences' states, and for too few of their tokens, on one R-worker."""
    with make_llm(folder, **(more or {})) as llm:
        limits = llm.engine.scheduler.limits
    block_bytes = (16 << 20) // limits.num_blocks[0]
    return {"kv_cache_memory": str((3 * limits.state_blocks + 13) * block_bytes), **(more or {})}


def texts(llm: LLM, kills: bool) -> list[list[int]]:
    """Return all outputs; with ``kills`` the busiest R-worker is killed once there are 100 tokens."""
    engine, tokens = llm.engine, dict[int, list[int]]()
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        if kills and sum(map(len, tokens.values())) >= 100:
            kills = False
            victim = int(engine.scheduler.store.workers.num_sequences.argmax())
            os.kill(r_workers.spawned_pids(llm)[victim], signal.SIGKILL)
    assert not kills
    assert_nothing_held(engine)
    return [tokens[number] for number in range(len(tokens))]
