"""Speculative decoding: drafts change how fast tokens come, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.drafting import always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.examples import thinned
from hypothesis import given
from hypothesis import strategies as st

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.core.errors import ConfigError
from fastdecode.drafting.ngram import continuation
from fastdecode.drafting.speculative_config import SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
"""The demo model repeats itself, so that some drafts are accepted and some are not."""

PROMPTS = [{"prompt_token_ids": [*range(3, 40 + i)] * 2} for i in range(8)]

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
    "random, with penalties": SamplingParams(
        temperature=0.7, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2, max_tokens=48, logprobs=2
    ),
    "several, seeded": SamplingParams(temperature=0.5, n=3, seed=4, max_tokens=30, min_tokens=20, top_k=20),
    "stop string": SamplingParams(temperature=0, max_tokens=48, stop=["e", "1"]),
    "bias": SamplingParams(temperature=0, max_tokens=24, logit_bias={100: 4.0}, bad_words=["th"]),
}


def run(params: SamplingParams, **settings: Any) -> list[RequestOutput]:
    """Return the demo model's outputs, and check that nothing stays behind."""
    with LLM(seed=3, s_threads=1, r_threads=1, kv_cache_memory="64MiB", **settings) as llm:
        if settings.get("speculative_config"):
            always_draft(llm.engine)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        if settings.get("speculative_config"):
            counts = llm.engine.scheduler.statistics.drafts
            assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
        assert_nothing_held(llm.engine)
        return outputs


def seen(outputs: list[RequestOutput]) -> list[list[dict[str, Any]]]:
    """Return all that a user sees of the texts."""
    return [[each.to_dict() for each in output.outputs] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(list(SAMPLINGS), 4, 1))
def test_every_kind_of_sampling_gives_the_same(name: str) -> None:
    """Tokens, texts, log-probabilities and reasons are the same, in float32."""
    wanted = seen(run(SAMPLINGS[name]))
    assert seen(run(SAMPLINGS[name], speculative_config=NGRAM)) == wanted
    settings = {"r_workers": "inproc:3", "num_mini_batches": 2, "speculative_config": {**NGRAM}}
    assert seen(run(SAMPLINGS[name], **settings)) == wanted


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 6))
def test_lookup_finds_what_a_search_would(tokens: list[int], least: int, count: int) -> None:
    """The place that agrees furthest back, the last of equal ones, is found as by a look at every place."""
    found = continuation(np.array(tokens), least, most=64, count=count)

    def agreeing(end: int) -> int:
        return next((i for i in range(end + 1) if tokens[end - i] != tokens[-1 - i]), end + 1)

    places = [end for end in range(len(tokens) - 1) if agreeing(end) >= least]
    if not places:
        assert found == []
        return
    best = max(places, key=lambda end: (agreeing(end), end))
    expected = list(tokens)
    for i in range(count):
        expected.append(expected[best + 1 + i])
    assert found == expected[len(tokens) :]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"method": "eagle"}, "method must be one of ngram, draft_model, early_exit, not 'eagle'"),
        ({"num_speculative_tokens": 3}, "method must be one of"),
        ({"method": "ngram"}, "num_speculative_tokens is missing: give a whole number from 1 to 64"),
        ({**NGRAM, "num_speculative_tokens": 0}, "from 1 to 64, not 0"),
        ({**NGRAM, "num_speculative_tokens": 2.5}, "not 2.5"),
        ({**NGRAM, "prompt_lookup_min": 5}, r"prompt_lookup_min \(5\) must be at most prompt_lookup_max \(4\)"),
        ({**NGRAM, "num_layers": 2}, "method ngram takes num_speculative_tokens, .*'num_layers' is for another method"),
        ({**NGRAM, "typo": 2}, "'typo' is unknown"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "draft_model needs a model"),
        ({"method": "early_exit", "num_speculative_tokens": 2}, "num_layers is missing"),
    ],
)
def test_bad_configurations_are_refused_by_name(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config: .*{complaint}"):
        EngineConfig(speculative_config=settings)


def test_defaults_are_vllms() -> None:
    ngram = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 3})
    assert ngram and (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (5, 5)
    ngram = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})
    assert ngram and (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (3, 3)
    assert EngineConfig().speculative is None
