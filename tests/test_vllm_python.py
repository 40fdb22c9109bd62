"""Python code that was written for vLLM: its arguments, fields and methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from fastdecode import LLM, EngineArgs, SamplingParams
from fastdecode.core.errors import ConfigError

PROMPT = "import os\n" * 20
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an LLM with the demo model."""
    with LLM(
        tensor_parallel_size=1, gpu_memory_utilization=0.5, max_model_len=512, kv_cache_memory="64MiB", seed=None,
        s_threads=1, r_threads=1,
    ) as llm:  # fmt: skip
        yield llm


def test_parameters_have_copies() -> None:
    params = SamplingParams(temperature=0.5, stop="x", max_tokens=3)
    assert params.clone() == params and params.clone() is not params
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses.replace\(params, n=2\)"):
        params.n = 2  # type: ignore[misc]
    assert SamplingParams.from_optional(temperature=None, n=2, max_tokens=None).max_tokens is None


def test_fields_without_effect_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {
        "output_kind": 2,
        "skip_clone": True,
        "spaces_between_special_tokens": False,
        "best_of": 2,
    }
    assert SamplingParams(**fields, n=2) == SamplingParams(n=2)
    (record,) = caplog.records
    assert "are ignored: output_kind, skip_clone" in record.getMessage()


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("best_of", 3, "give n, and choose"),
        ("use_beam_search", True, "there is no beam search"),
        ("guided_decoding", object(), "give structured_outputs=StructuredOutputsParams"),
        ("logits_processors", [print], "logit_bias, allowed_token_ids and bad_words"),
        ("thinking_token_budget", 100, "give max_tokens"),
        ("repetition_detection", {"n": 3}, "give repetition_penalty"),
        ("truncate_prompt_tokens", 5, "give the token ids that are to stay"),
        ("max_token", 5, "unknown field 'max_token'"),
    ],
)
def test_other_fields_say_what_to_do(field: str, value: Any, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        SamplingParams(**{field: value})
    if not cure.startswith("unknown"):
        SamplingParams(**{field: None})


def test_prompts_as_token_ids_have_an_argument(llm: LLM) -> None:
    (by_text,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    ids = by_text.prompt_token_ids
    (alone,) = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)
    one, two = llm.generate(["a", "b"], GREEDY, use_tqdm=False, prompt_token_ids=[ids, ids], priority=[0, 0])
    tokens = {tuple(each.outputs[0].token_ids) for each in (by_text, alone, one, two)}
    assert len(tokens) == 1 and (one.prompt, two.prompt, alone.prompt) == ("a", "b", None)
    with pytest.raises(ConfigError, match="give prompts"):
        llm.generate(sampling_params=GREEDY)
    with pytest.raises(ConfigError, match="2 prompts and 1 prompt_token_ids"):
        llm.generate(["a", "b"], prompt_token_ids=[ids])


def test_outputs_have_vllm_s_fields(llm: LLM) -> None:
    llm.reset_prefix_cache()
    (first,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    (again,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert first.num_cached_tokens == 0 and 0 < again.num_cached_tokens < len(again.prompt_token_ids)
    assert again.num_cached_tokens % 32 == 0
    (output,) = again.outputs
    chosen = [found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen)) and output.finished()
    assert (again.prompt_logprobs, again.lora_request) == (None, None)
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)
    assert plain.outputs[0].cumulative_logprob is None


def test_arguments_of_methods(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="priority: requests come first in"):
        llm.generate("a", GREEDY, priority=[1])
    with pytest.raises(ConfigError, match="unknown argument 'max_tokens'"):
        llm.generate("a", max_tokens=3)
    assert llm.reset_prefix_cache(reset_running_requests=False) is True
    bars: list[dict[str, Any]] = []

    def bar(**options: Any) -> Any:
        from tqdm import tqdm

        bars.append(options)
        return tqdm(**{**options, "disable": True})

    llm.generate("a", GREEDY, use_tqdm=bar)
    assert bars[0]["total"] == 1


def test_a_model_of_engine_args_has_sampling_defaults() -> None:
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory": "16MiB", "s_threads": 1, "r_threads": 1}
    replaced = {"temperature": 0.25, "max_new_tokens": 3}
    with LLM.from_engine_args(EngineArgs(**settings, override_generation_config=replaced)) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens) == (0.25, 3)
    with LLM(**settings, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match=r"'/no' has no generation_config\.json"):
        LLM(**settings, generation_config="/no")
