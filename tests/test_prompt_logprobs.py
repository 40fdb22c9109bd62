"""Log-probabilities of prompts' tokens are transformers', whatever else runs, and completions echo them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_checks import assert_nothing_held
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import RunningServer
from transformers import AutoModelForCausalLM

from fastdecode import LLM, SamplingParams
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.api.outputs import Logprob

SETTINGS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": "16MiB", "s_threads": 1, "device": "cpu"}
TEXT = "def read_lines(self, path):\n    with open(path) as file:\n        return [line for line in file]\n" * 4
SCORING = {"echo": True, "logprobs": 1}
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm
        assert_nothing_held(llm.engine)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Return log-probabilities of every token at every position of the text: float32 [tokens - 1, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with LLM(**SETTINGS) as llm, torch.inference_mode():
        ids = llm.get_tokenizer()(TEXT)["input_ids"]
        return np.asarray(model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1))


def check(found: list[dict[int, Logprob] | None] | None, token_ids: list[int], expected: np.ndarray) -> None:
    assert found and found[0] is None and len(found) == len(token_ids) == len(expected) + 1
    for row, token_id, entries in zip(expected, token_ids[1:], found[1:], strict=True):
        assert entries is not None and token_id in entries
        assert {0, 1} <= {each.rank - 1 for each in entries.values()} and len(entries) in (2, 3)
        for token, each in entries.items():
            assert each.logprob == pytest.approx(row[token], abs=1e-3)
        assert max(each.logprob for each in entries.values()) == pytest.approx(row.max(), abs=1e-3)


def test_they_are_those_of_transformers(llm: LLM, expected: np.ndarray) -> None:
    """One prompt is longer than a step scores, one has a cached beginning, and other requests change nothing."""
    (alone,) = llm.generate(TEXT, SCORED, use_tqdm=False)
    check(alone.prompt_logprobs, alone.prompt_token_ids, expected)
    assert len(alone.prompt_token_ids) > 300
    plain = SamplingParams(temperature=0, max_tokens=4)
    params = [plain, SCORED, plain, SCORED]
    several = llm.generate(["x = ", TEXT, TEXT, TEXT[:40]], params, use_tqdm=False)
    assert [output.prompt_logprobs is None for output in several] == [True, False, True, False]
    assert several[1].prompt_logprobs == alone.prompt_logprobs
    assert (
        alone.prompt_logprobs
        and several[3].prompt_logprobs == alone.prompt_logprobs[: len(several[3].prompt_token_ids)]
    )
    assert several[1].outputs[0].token_ids == several[2].outputs[0].token_ids[:2]


def test_several_samples_share_them(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=2, prompt_logprobs=0)
    (output,) = llm.generate(TEXT[:30], params, use_tqdm=False)
    assert len(output.outputs) == 3 and output.prompt_logprobs
    assert [None if each is None else len(each) for each in output.prompt_logprobs] == [None] + [1] * len(
        output.prompt_token_ids[1:]
    )
    json.dumps(output.to_dict())


@pytest.mark.slow
def test_two_r_workers_in_two_mini_batches_change_nothing(expected: np.ndarray) -> None:
    with LLM(**SETTINGS, r_workers="inproc:2", num_mini_batches=2) as llm:
        for output in llm.generate([TEXT] * 3, SCORED, use_tqdm=False):
            check(output.prompt_logprobs, output.prompt_token_ids, expected)
        assert_nothing_held(llm.engine)


def events(server: RunningServer, body: Any) -> list[Any]:
    asked = urllib.request.Request(server.url + "/v1/completions", json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as response:
        return [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: {")]


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_completions_echo_them(chat_server: RunningServer, max_tokens: int) -> None:
    """Several prompts are echoed as lm-eval asks for them, whole and streamed, with further tokens or without."""
    ids = [list(b"def f(x):"), list("é = 1".encode())]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": max_tokens}
    status, answer = chat_server.request("/v1/completions", body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 2 * max_tokens, answer
    for choice, prompt in zip(answer["choices"], ids, strict=True):
        told = choice["logprobs"]
        assert {len(values) for values in told.values()} == {len(prompt) + max_tokens}
        assert choice["text"].startswith(bytes(prompt).decode()) and choice["finish_reason"] == "length"
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None and told["text_offset"][0] == 0
        for token, worth, likeliest in list(zip(*[told[kind] for kind in list(told)[:3]], strict=True))[1:]:
            assert likeliest[token] == worth <= max(likeliest.values()) and len(likeliest) in (1, 2)
    assert answer["choices"][1]["logprobs"]["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", " "]
    assert answer["choices"][1]["logprobs"]["text_offset"][:4] == [0, 0, 1, 2]
    texts, told = ["", ""], [dict[str, list[Any]](), dict[str, list[Any]]()]
    for event in events(chat_server, body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            for kind, values in (choice["logprobs"] or {}).items():
                told[choice["index"]].setdefault(kind, []).extend(values)
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert told == [choice["logprobs"] for choice in answer["choices"]]


@pytest.mark.slow
def test_usage_tells_what_was_cached(chat_server: RunningServer) -> None:
    """All routes say it, and a scored prompt uses no cached tokens."""
    prompt = (
        "class Reader:\n    def __init__(self, path, encoding, errors, newline, buffering):\n        self.path = path\n"
        * 2
    )
    body = {"prompt": prompt, "max_tokens": 1}
    found = [chat_server.request("/v1/completions", {**body, **more})[1]["usage"] for more in ({}, {}, SCORING)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]
    assert cached[0] == cached[2] == 0 and 0 < cached[1] < found[1]["prompt_tokens"]
    *_, last = events(chat_server, {**body, "stream_options": {"include_usage": True}})
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == cached[1]
    for _ in range(2):
        _, response = chat_server.request("/v1/responses", {"input": prompt, "max_output_tokens": 1})
    assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0
