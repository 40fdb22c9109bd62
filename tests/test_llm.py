"""``LLM`` apart from ``generate`` and ``chat``: the methods that users of vLLM look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import fastdecode
from fastdecode import LLM, EngineArgs, LLMEngine, SamplingParams, TextPrompt, TokensPrompt
from fastdecode.api.from_vllm import IGNORED, NAMES, REFUSED
from fastdecode.core.errors import ConfigError, RequestError

PROMPT = "def read_lines(self, path):\n    return [line.strip() for line in path]\n" * 2
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an LLM made with vLLM's argument names, including those without effect here."""
    vllms = {"kv_cache_memory_bytes": 16 << 20, "pipeline_parallel_size": 1, "tokenizer_mode": "auto", "swap_space": 4}
    with LLM(max_model_len=256, s_threads=1, enable_prefix_caching=True, **vllms) as llm:
        assert llm.engine.config.kv_cache_memory == 16 << 20
        yield llm


def test_the_engine_has_vllm_s_name_too(llm: LLM) -> None:
    assert isinstance(llm.llm_engine, LLMEngine)
    assert llm.llm_engine is llm.engine


def test_prompts_have_vllm_s_names_too(llm: LLM) -> None:
    ids = list(llm.generate(TextPrompt(prompt="import "), GREEDY, use_tqdm=False)[0].prompt_token_ids)
    texts = llm.generate([TextPrompt(prompt="import "), TokensPrompt(prompt_token_ids=ids)], GREEDY, use_tqdm=False)
    assert texts[0].outputs[0].text == texts[1].outputs[0].text != ""


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ("hi", {"sampling_params": {"temperature": 0}}, "sampling_params must be SamplingParams"),
        ("hi", {"sampling_params": [{"temperature": 0}]}, "sampling_params must be SamplingParams"),
        ("hi", {"lora_request": object()}, "lora_request: one adapter is merged into the weights"),
        ({"prompt": "hi", "multi_modal_data": {"image": 1}}, {}, "'multi_modal_data' is not supported"),
    ],
)
def test_what_cannot_be_given_is_refused_by_one_clear_line(llm: LLM, prompt: Any, given: Any, message: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=message):
        llm.generate(prompt, **given)
    assert not llm.llm_engine.has_unfinished_requests()


def test_methods_settings_and_names_of_vllm_say_what_to_do_instead(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AttributeError, match="LLM has no embed: models that embed"):
        llm.embed("hi")
    for name in sorted(REFUSED):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            EngineArgs(**{name: 0.5})
        EngineArgs(**{name: None})
    assert not caplog.records
    EngineArgs(**dict.fromkeys(IGNORED, 3))
    (record,) = caplog.records
    assert "are ignored: aggregate_engine_logging, all2all_backend, " in record.getMessage()
    for name in NAMES:
        with pytest.raises(ImportError, match=f"there is no fastdecode.{name}: "):
            getattr(fastdecode, name)


def test_reset_prefix_cache_forgets_every_prefix(llm: LLM) -> None:
    """A prompt that comes again is a hit before the reset, and is computed again, to the same tokens, after it."""

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
    """A reset between two steps of running requests keeps their tokens, and nothing is held afterwards."""
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
