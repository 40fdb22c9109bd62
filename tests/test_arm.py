"""An R-worker of ARM under qemu beside one of this machine: `make arm-python` names its program and runs this file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from helpers import r_workers

from fastdecode import LLM, SamplingParams

PROGRAM = os.environ.get("FASTDECODE_ARM", "")
PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j) % 250 + 1 for j in range(1 + i % 40)]} for i in range(64)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "silence_seconds": 60.0}

pytestmark = pytest.mark.skipif(not PROGRAM, reason="needs an R-worker of ARM: make arm-python")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start one R-worker of ARM and one of this machine; return their pool's address."""
    with ExitStack() as processes:
        _, here = processes.enter_context(r_workers.listening())
        monkeypatch.setenv(r_workers.PROGRAM, PROGRAM)
        _, there = processes.enter_context(r_workers.listening())
        yield f"{there},{here}"


def generated(**settings: Any) -> tuple[list[list[int]], np.ndarray, list[str]]:
    """Return the tokens of all prompts, the KV tokens that each R-worker attended, and their instruction sets."""
    with LLM(**SMALL | settings) as llm:
        loads: list[tuple[int, ...]] = []
        llm.engine.on_step = lambda record: loads.append(record.kv_loads)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        isas = [worker.isa for worker in llm.engine.r_workers]
    return [list(output.outputs[0].token_ids) for output in outputs], np.sum(loads, axis=0), isas


def test_tokens_of_a_mixed_pool_in_one_arithmetic(pool: str) -> None:
    expected, _, _ = generated(kv_cache_memory="64MiB", uniform_arithmetic="scalar")
    tokens, loads, isas = generated(r_workers=pool, uniform_arithmetic="scalar")
    assert isas == ["scalar", "scalar"] and (loads > 0).all()
    assert tokens == expected


def test_a_mixed_pool_of_unlike_arithmetic_serves(pool: str) -> None:
    """Both R-workers serve; tokens are not compared, since each R-worker rounds in its own way."""
    tokens, loads, isas = generated(r_workers=pool)
    assert isas[0].startswith("neon") and not isas[1].startswith("neon") and (loads > 0).all()
    expected, _, _ = generated(kv_cache_memory="64MiB")
    print(sum(a != b for a, b in zip(tokens, expected, strict=True)), "of 64 sequences have other tokens", loads)
