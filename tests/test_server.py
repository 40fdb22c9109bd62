"""The OpenAI API over a real server process, used by the openai package and by plain HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.processes import PATIENCE_SECONDS, children_of
from helpers.servers import MODEL, RunningServer, metrics, serving, total, wait_until_idle

from fastdecode import LLM, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [f"def f{number}(self, x):\n    " for number in range(12)]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture
def server(chat_server: RunningServer) -> RunningServer:
    return chat_server


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return the engine's own greedy texts."""
    with LLM(max_model_len=256, kv_cache_memory="64MiB", device="cpu") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_completions_are_those_of_generate(server: RunningServer, expected: list[str]) -> None:
    """Completions come one by one, all in one request, and streamed, in whole and in parts."""
    with client(server) as api:
        one = api.completions.create(prompt=PROMPTS[0], **GREEDY)
        assert one.choices[0].text == expected[0] and one.choices[0].finish_reason == "length"
        assert one.usage and one.usage.completion_tokens == 24 and one.model == MODEL
        several = api.completions.create(prompt=PROMPTS, **GREEDY)
        assert [choice.text for choice in several.choices] == expected
        assert [choice.index for choice in several.choices] == list(range(len(PROMPTS)))
        texts = [""] * len(PROMPTS)
        usage = None
        for event in api.completions.create(
            prompt=PROMPTS, stream=True, stream_options={"include_usage": True}, **GREEDY
        ):
            usage = event.usage
            for choice in event.choices:
                texts[choice.index] += choice.text
        assert texts == expected and usage and usage.completion_tokens == 24 * len(PROMPTS)


def test_many_streams_at_once(server: RunningServer, expected: list[str]) -> None:
    async def stream(api: openai.AsyncOpenAI, prompt: str) -> tuple[str, int]:
        text, count = "", 0
        async for event in await api.completions.create(prompt=prompt, stream=True, **GREEDY):
            text += event.choices[0].text
            count += 1
        return text, count

    async def run() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(stream(api, prompt) for prompt in PROMPTS))

    found = asyncio.run(run())
    assert [text for text, _ in found] == expected
    assert all(count > 4 for _, count in found)


def test_chats(server: RunningServer, expected: list[str]) -> None:
    """Chats use the template, tools included, whole and streamed."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with client(server) as api:
        whole = api.chat.completions.create(messages=messages, tools=[tool], **GREEDY)
        assert whole.choices[0].message.role == "assistant" and whole.usage
        assert whole.usage.prompt_tokens == len("[look]<user>hi\n<assistant>")
        same = api.completions.create(
            prompt=server.request("/tokenize", {"messages": messages, "tools": [tool]})[1]["tokens"], **GREEDY
        )
        assert whole.choices[0].message.content == same.choices[0].text
        events = list(api.chat.completions.create(messages=messages, tools=[tool], stream=True, **GREEDY))
        deltas = [event.choices[0].delta for event in events]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
        assert events[-1].choices[0].finish_reason == "length"


def test_answers_have_the_form_that_is_asked(server: RunningServer) -> None:
    """The form is given by response_format, or by vLLM's structured_outputs."""
    properties = {"name": {"enum": ["a", "bc"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with client(server) as api:
        answer = api.chat.completions.create(
            model=MODEL, messages=messages, temperature=1, seed=1, max_tokens=100,
            logit_bias={str(ord(blank)): -100 for blank in " \n\t\r"},  # The model prefers blanks to an end.
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        )  # fmt: skip
        found = json.loads(answer.choices[0].message.content or "")
        assert set(found) == {"name", "age"} and found["name"] in ("a", "bc") and 0 <= found["age"] <= 99
        text = api.completions.create(
            model=MODEL, prompt="x", max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert text.choices[0].text in ("yes", "no")
        # guided_choice is vLLM's older name.
        asked: dict[str, Any] = {"guided_choice": ["yes", "no"], "add_special_tokens": False}
        text = api.completions.create(model=MODEL, prompt="x", max_tokens=20, extra_body=asked)
        assert text.choices[0].text in ("yes", "no") and text.usage and text.usage.prompt_tokens == 1
        only = {"allowed_token_ids": [ord("a"), ord("b")]}
        text = api.completions.create(model=MODEL, prompt="x", max_tokens=20, temperature=2, extra_body=only)
        assert len(text.choices[0].text) == 20 and set(text.choices[0].text) <= {"a", "b"}
        for wrong in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}):
            with pytest.raises(openai.BadRequestError):
                api.chat.completions.create(model=MODEL, messages=messages, response_format=wrong)  # type: ignore[call-overload]


def test_streams_go_on_while_a_large_schema_is_compiled(server: RunningServer) -> None:
    """A stream never waits while other requests' schemas are compiled or refused.

    If it did, it would each time; when another process delays all of them, it does not do so five times in a row.
    """
    assert any(longest_gap(server, f"p{turn}") < 0.5 for turn in range(5))


def longest_gap(server: RunningServer, name: str) -> float:
    """Return the longest gap between a stream's tokens, as a part of the time of compiling a schema."""
    schema = large_schema(name)
    moments: list[float] = []
    started, ended = threading.Event(), threading.Event()

    def follow() -> None:
        with client(server) as api:
            while not ended.is_set():
                for _ in api.completions.create(prompt="def f(", stream=True, **{**GREEDY, "max_tokens": 200}):
                    moments.append(time.perf_counter())
                    started.set()

    other = threading.Thread(target=follow)
    other.start()
    try:
        assert started.wait(PATIENCE_SECONDS)
        start = time.perf_counter()
        body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
        status, answer = server.request("/v1/completions", body)
        end = time.perf_counter()
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
        for stream in (False, True):  # The schema has a keyword that is refused when it is compiled.
            wrong = {**schema, "properties": {**schema["properties"], "last": {"type": "string", "pattern": "("}}}
            status, answer = server.request(
                "/v1/completions", {**body, "stream": stream, "structured_outputs": {"json": wrong}}
            )
            assert status == 400 and "structured_outputs cannot be followed" in answer["error"]["message"]
    finally:
        ended.set()
        other.join()
    between = [before for before in (start, *moments) if start <= before <= end] + [end]
    return max(after - before for before, after in itertools.pairwise(between)) / (end - start)


def large_schema(name: str) -> dict[str, Any]:
    """Return a schema that takes about a second to compile; ``name`` begins those of its properties."""
    properties = {
        f"{name}{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 30 + 2}}}[0-9]{i % 7}+$"} for i in range(4000)
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def test_errors_have_openai_s_shape(server: RunningServer) -> None:
    with client(server) as api:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            api.completions.create(model="another", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature must be a number") as caught:
            api.completions.create(model=MODEL, prompt="x", temperature=-1)
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match="max_model_len"):
            api.completions.create(model=MODEL, prompt="x" * 300, stream=True)
        assert [model.id for model in api.models.list()] == [MODEL, "other"]


def test_an_api_key_guards_all_but_health(tmp_path: Path, expected: list[str]) -> None:
    """The server has two ranks, answers as one rank does, drops aborted requests, and ends as a whole."""
    with serving(tmp_path, "--tensor-parallel-size", "2", FASTDECODE_API_KEY="secret") as running:
        for path in ("/v1/models", "/version", "/metrics", "/openapi.json", "/docs", "/nothing"):
            status, body = running.request(path)
            assert status == 401 and "API key" in body["error"]["message"]
            assert running.request(path, headers={"authorization": "Bearer wrong"})[0] == 401
        assert running.request("/health") == (200, {})
        key = {"authorization": "bearer secret"}
        assert running.request("/v1/models", headers=key)[0] == 200
        (rank,) = children_of(running.process.pid, "tensor_parallel.process")
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="secret", max_retries=0) as api:
            name = api.models.list().data[0].id
            stream = api.completions.create(prompt=PROMPTS, stream=True, **{**GREEDY, "model": name, "max_tokens": 200})
            next(iter(stream))
            stream.close()
            found = api.completions.create(prompt=PROMPTS, **{**GREEDY, "model": name})
        assert [choice.text for choice in found.choices] == expected
        running.process.terminate()
        assert running.process.wait(PATIENCE_SECONDS) == 0 and not Path(f"/proc/{rank}").exists()


def test_metrics_count_what_was_done(server: RunningServer) -> None:
    """Counters have vLLM's names and grow with each request, and nothing is held afterwards."""

    before = metrics(server)
    asked = {**GREEDY, "prompt": ["12345", "678"], "ignore_eos": True, "max_tokens": 5}
    assert server.request("/v1/completions", asked)[0] == 200
    success = "fastdecode:request_success_total"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while total(server, success) < 2 + sum(value for name, value in before.items() if name.startswith(success)):
        assert time.monotonic() < deadline  # The engine answers first, and counts then.
    wait_until_idle(server)
    after = metrics(server)
    grown: dict[str, float] = Counter()
    for name, value in after.items():
        if "bucket" not in name:
            grown[name.removeprefix("fastdecode:").partition("{")[0]] += value - before.get(name, 0)
    assert grown["prompt_tokens_total"] == grown["prefix_cache_queries_total"] == 10
    assert grown["generation_tokens_total"] == 10 and grown["request_success_total"] == 2
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 2
    assert grown["inter_token_latency_seconds_count"] == 8 and grown["request_queue_time_seconds_count"] == 2
    assert 0 < grown["request_queue_time_seconds_sum"] < grown["time_to_first_token_seconds_sum"]
    assert grown["s_seconds_total"] > 0 and grown["r_seconds_total"] > 0 and grown["steps_total"] >= 5
    names = {name.partition("{")[0]: value for name, value in after.items()}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert names[f"fastdecode:{name}"] == 0
    assert names["fastdecode:r_workers_alive"] == 1 and names["fastdecode:r_worker_kv_blocks"] > 0
    labelled = f'fastdecode:time_to_first_token_seconds_bucket{{le="+Inf",model_name="{MODEL}"}}'
    assert after[labelled] - before[labelled] == 2
