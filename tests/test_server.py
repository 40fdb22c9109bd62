"""The OpenAI API over a real server process, asked by the openai package and by plain HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.servers import CHAT_TEMPLATE, RunningServer, serving

from fastdecode import LLM, SamplingParams

MODEL = "demo"
PROMPTS = [f"def f{number}(self, x):\n    " for number in range(12)]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--served-model-name", f"{MODEL},other", "--chat-template", CHAT_TEMPLATE, "--max-num-seqs", "32"]
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What the engine itself says, greedily."""
    with LLM(max_model_len=256, kv_cache_memory="64MiB", device="cpu") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_completions_are_those_of_generate(server: RunningServer, expected: list[str]) -> None:
    """One by one, all in one request, and streamed, in whole and in parts."""
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
    """Through the template, tools included, whole and streamed."""
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


def test_an_api_key_guards_all_but_health(tmp_path: Path) -> None:
    with serving(tmp_path, FASTDECODE_API_KEY="secret") as running:
        for path in ("/v1/models", "/version", "/metrics", "/openapi.json", "/docs", "/nothing"):
            status, body = running.request(path)
            assert status == 401 and "API key" in body["error"]["message"]
            assert running.request(path, headers={"authorization": "Bearer wrong"})[0] == 401
        assert running.request("/health") == (200, {})
        assert running.request("/v1/models", headers={"authorization": "Bearer secret"})[0] == 200
        running.process.terminate()
        assert running.process.wait(20) == 0
