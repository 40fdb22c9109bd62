"""``LLM`` beside ``generate`` and ``chat``: the names that users of vLLM look for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdecode import LLM, SamplingParams
from fastdecode.engine import LLMEngine

PROMPT = "def read_lines(self, path):\n    return [line.strip() for line in path]\n" * 2
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=256, kv_cache_memory="16MiB", s_threads=1, enable_prefix_caching=True) as llm:
        yield llm


def test_the_engine_has_vllm_s_name_too(llm: LLM) -> None:
    assert isinstance(llm.llm_engine, LLMEngine)
    assert llm.llm_engine is llm.engine


def test_reset_prefix_cache_forgets_every_prefix(llm: LLM) -> None:
    """A prompt that comes again is found until then, and computed again, to the same tokens, after it."""

    def tokens_and_hits() -> tuple[list[int], int]:
        before = llm.llm_engine.scheduler.statistics.prefix_hit_tokens
        (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids), llm.llm_engine.scheduler.statistics.prefix_hit_tokens - before

    first, no_hits = tokens_and_hits()
    again, hits = tokens_and_hits()
    assert no_hits == 0 and hits > 0 and again == first
    assert llm.llm_engine.backend.blocks_used > 0
    llm.reset_prefix_cache()
    assert llm.llm_engine.backend.blocks_used == 0
    assert tokens_and_hits() == (first, 0)


def test_reset_prefix_cache_leaves_running_requests_alone(llm: LLM) -> None:
    """Between two of their steps: the tokens stay the same, and nothing is held afterwards."""
    (wanted,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    engine = llm.llm_engine
    engine.add_request("running", PROMPT, GREEDY)
    engine.step()
    llm.reset_prefix_cache()
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == wanted.outputs[0].token_ids
    llm.reset_prefix_cache()
    assert engine.backend.blocks_used == 0
