"""SamplingParams: vLLM's defaults, normalised values, and one clear line for every value that cannot work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import ConfigError, RequestError

VLLM_DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": (),
    "bad_words": (),
    "skip_special_tokens": True,
    "shown_special_token_ids": (),  # This field is our own.
    "include_stop_str_in_output": False,
    "detokenize": True,
    "structured_outputs": None,
    "attention_sources": None,
    "attention_source_block": 16,
    "attention_source_layers": None,
}

NAN, INF = math.nan, math.inf
NOT_NUMBERS: list[Any] = [True, "1", None, NAN, INF, -INF, [1.0], 10**400]
NOT_INTEGERS: list[Any] = [True, "1", 1.5, 2.0, NAN, [1]]

REFUSED: list[tuple[str, list[Any], str]] = [
    ("n", [0, -1, 16385, None, *NOT_INTEGERS], "an integer from 1 to 16384"),
    ("temperature", [-0.1, -1, 1e7, *NOT_NUMBERS], "a number from 0 (greedy) to 1e+06"),
    ("top_p", [0, 0.0, -0.5, 1.0001, 2, *NOT_NUMBERS], "a number above 0 and at most 1"),
    ("top_k", [-2, None, *NOT_INTEGERS], "an integer of at least 1, or 0 (or -1) to keep all tokens"),
    ("min_p", [-0.1, 1.1, *NOT_NUMBERS], "a number from 0 to 1"),
    ("repetition_penalty", [0, -1.0, 1e7, 1e-7, *NOT_NUMBERS], "a number from 1e-06 to 1e+06 (1 is no penalty)"),
    ("presence_penalty", [-2.1, 2.1, *NOT_NUMBERS], "a number from -2 to 2"),
    ("frequency_penalty", [-2.1, 2.1, *NOT_NUMBERS], "a number from -2 to 2"),
    ("seed", [2**64, -(2**63) - 1, *NOT_INTEGERS], "an integer of at most 64 bits, or None"),
    ("max_tokens", [0, -5, *NOT_INTEGERS], "an integer of at least 1, or None for up to the model's length"),
    ("min_tokens", [-1, None, *NOT_INTEGERS], "an integer of at least 0"),
    ("stop", ["", [""], ["a", ""], [1], 5, {"a": 1}, [["a"]]], "a non-empty string or a list of them"),
    ("stop_token_ids", [5, "5", [-1], [1.0], [True], ["a"]], "a list of token ids (integers of at least 0)"),
    ("shown_special_token_ids", [5, "5", [-1], [1.0]], "a list of token ids (integers of at least 0)"),
    ("allowed_token_ids", [[]], "a list of token ids (integers of at least 0), not an empty one, or None"),
    ("allowed_token_ids", [5, "5", [-1], [1.0], [True]], "a list of token ids (integers of at least 0)"),
    ("logprobs", [-2, *NOT_INTEGERS], "an integer of at least 0, -1 for the whole vocabulary, or None"),
    ("prompt_logprobs", [-2, *NOT_INTEGERS], "an integer of at least 0, -1 for the whole vocabulary, or None"),
    (
        "logit_bias",
        [[1], "x", {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1: NAN}, {1: INF}, {1: -INF}, {1: "2"}, {1: True}, {1: 1e7}],
        "a dict of token ids (integers of at least 0) to numbers from -1e+06 to 1e+06",
    ),
    ("bad_words", ["word", [""], [1], 5], "a list of non-empty words"),
    ("ignore_eos", [1, 0, "yes", None], "True or False"),
    ("skip_special_tokens", [1, None], "True or False"),
    ("include_stop_str_in_output", [1, None], "True or False"),
    ("detokenize", [1, None], "True or False"),
    ("attention_sources", [0, 1025, *NOT_INTEGERS], "an integer from 1 to 1024, or None"),
    ("attention_source_block", [0, None, *NOT_INTEGERS], "an integer of at least 1"),
    (
        "attention_source_layers",
        [5, "5", [], [-1], [1.0], [True]],
        "a list of layers' numbers from 0, not an empty one, or None for all that see the whole context",
    ),
    ("structured_outputs", [{"regex": "a"}, "json"], "a StructuredOutputsParams, or None"),
]


def test_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == VLLM_DEFAULTS


def test_every_field_has_a_refusal() -> None:
    assert {name for name, _, _ in REFUSED} == set(VLLM_DEFAULTS)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        pytest.param(name, value, wanted, id=f"{name}={str(value)[:20]}")
        for name, values, wanted in REFUSED
        for value in values
    ],
)
def test_refuses_by_name(name: str, value: object, wanted: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = str(refusal.value)
    assert message.startswith(f"{name} must be {wanted}, got ")
    assert "\n" not in message and len(message) < 200
    assert isinstance(refusal.value, ValueError)


def test_the_message_shows_the_value() -> None:
    with pytest.raises(ConfigError, match=r"^temperature must be .*, got -0\.5$"):
        SamplingParams(temperature=-0.5)
    with pytest.raises(ConfigError, match=r"^top_p must be .*, got '0\.9'$"):
        SamplingParams(top_p="0.9")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^logit_bias must be .*, got {3: nan}$"):
        SamplingParams(logit_bias={1: 1.0, 3: NAN})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens=16, got 17"),
        ({"stop": "x", "detokenize": False}, "stop must be empty when detokenize is False"),
        ({"n": 2, "temperature": 0}, "n must be 1 when temperature is 0"),
    ],
)
def test_refuses_contradictions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SamplingParams(**fields)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 1, "min_p": 1, "repetition_penalty": 2, "top_k": -1},
        {"max_tokens": None, "min_tokens": 100},
        {"n": 16384, "seed": 2**64 - 1, "logprobs": -1},
        {"presence_penalty": -2, "frequency_penalty": 2, "logprobs": 0, "seed": 0},
        {"temperature": np.float32(0.5), "top_k": np.int64(5), "stop_token_ids": [np.int32(3)]},
    ],
)
def test_accepts_the_edges(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


def test_values_are_normalised() -> None:
    bias = {np.int64(3): 1}
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop="end",
        stop_token_ids=[5, 3, 5],
        bad_words=["a", "b", "a"],
        logit_bias=bias,  # type: ignore[arg-type]
        seed=-1,
    )
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("end",), (5, 3), ("a", "b"))
    assert params.logit_bias == {3: 1.0} and params.seed is None
    assert type(params.temperature) is float
    bias[np.int64(4)] = 2
    assert params.logit_bias == {3: 1.0}, "later changes of the caller's dict must not reach the request"
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_frozen_hashable_and_replaceable() -> None:
    params = SamplingParams(stop=["x"], logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]
    changed = dataclasses.replace(params, top_k=3)
    assert changed.stop == ("x",) and changed.top_k == 3 and changed != params
    assert hash(params) == hash(SamplingParams(stop="x", logit_bias={1: 2.0}))
    with pytest.raises(ConfigError, match=r"^top_k"):
        dataclasses.replace(params, top_k=-7)


def test_greedy_and_changes_logits() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy
    assert not SamplingParams(top_p=0.5, top_k=3, min_p=0.1, bad_words=["x"]).changes_logits
    for fields in ({"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1}, {"presence_penalty": 1}):
        assert SamplingParams(**fields).changes_logits
    assert SamplingParams(frequency_penalty=-1).changes_logits


def test_token_ids_against_a_vocabulary() -> None:
    params = SamplingParams(logit_bias={99: 1.0}, stop_token_ids=[7])
    params.check_token_ids(100)
    with pytest.raises(RequestError, match=r"^logit_bias must hold token ids from 0 to 98, got \[99\]$"):
        params.check_token_ids(99)
    with pytest.raises(RequestError, match=r"^stop_token_ids must hold token ids from 0 to 6, got \[7\]$"):
        SamplingParams(stop_token_ids=[7]).check_token_ids(7)
    with pytest.raises(RequestError, match=r"^allowed_token_ids must hold token ids from 0 to 6, got \[7\]$"):
        SamplingParams(allowed_token_ids=[7]).check_token_ids(7)
