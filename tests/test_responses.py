"""OpenAI's Responses API, used by the openai package: whole, streamed, with a form, with calls, and refused."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from helpers.servers import MODEL, RunningServer
from pydantic import BaseModel

pytestmark = pytest.mark.slow

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
COMPACT = {"logit_bias": {str(ord(blank)): -100 for blank in " \n\t\r"}}
"""A bias against blanks, which the demo model prefers to an end."""

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look around.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"where": {"enum": ["here", "there"]}},
        "required": ["where"],
        "additionalProperties": False,
    },
}

CALLING = '<tool_call>{"name": "look", "arguments": {"where": "here"}}</tool_call>'


class Person(BaseModel):
    name: Literal["a", "bc"]
    age: Literal[1, 2]


@pytest.fixture
def api(chat_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0)


def chat(api: openai.OpenAI, *messages: dict[str, Any], **more: Any) -> str:
    """Return the chat route's answer."""
    asked: Any = {"model": MODEL, "temperature": 0, "max_completion_tokens": 24, "messages": list(messages), **more}
    return api.chat.completions.create(**asked).choices[0].message.content or ""


def test_a_response_is_the_chat_s_answer(api: openai.OpenAI) -> None:
    """The text, all kinds of items, the usage and the status agree, and nothing is stored."""
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    with api:
        found = api.responses.create(input="hi", **GREEDY)
        assert found.output_text == chat(api, user) and found.model == MODEL
        assert found.status == "incomplete" and found.incomplete_details
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.usage and found.usage.input_tokens == len("<user>hi\n<assistant>")
        assert (found.usage.output_tokens, found.usage.total_tokens) == (24, 24 + found.usage.input_tokens)
        more = api.responses.create(input="hi", instructions="be brief", store=True, metadata={"a": "b"}, **GREEDY)
        assert more.output_text == chat(api, system, user) and more.metadata == {"a": "b"}
        assert more.model_extra and more.model_extra["store"] is False
        parts: Any = [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        several: Any = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "type": "message"},
            *found.output,
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a wall"},
        ]
        assert api.responses.create(input=several, **GREEDY).output_text == chat(
            api, system, {"role": "user", "content": "h\ni"},
            {"role": "assistant", "content": found.output_text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a wall"},
        )  # fmt: skip


def test_streams_have_openai_s_events(api: openai.OpenAI) -> None:
    """Events are in order and numbered, and give the whole response: sync, by the package's collector, and async."""
    with api:
        whole = api.responses.create(input="hi", **GREEDY)
        events = list(api.responses.create(input="hi", stream=True, **GREEDY))
        kinds = [event.type for event in events]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert kinds[:4] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        ]  # fmt: skip
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response.incomplete",
        ]  # fmt: skip
        assert len(deltas) > 2 and "".join(deltas) == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
        assert last.response.usage == whole.usage
        stop = {**GREEDY, "extra_body": {"stop": whole.output_text[-3:]}}
        begun = whole.output_text[: whole.output_text.index(whole.output_text[-3:])]
        with api.responses.stream(input="hi", **stop) as stream:
            collected = stream.get_final_response()
        assert collected.status == "completed" and collected.output_text == begun

    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=api.base_url, api_key="none", max_retries=0) as client:
            once = await client.responses.create(input="hi", **GREEDY)
            async with client.responses.stream(input="hi", **stop) as stream:
                return once.output_text, (await stream.get_final_response()).output_text

    assert asyncio.run(ask()) == (whole.output_text, begun)


def test_texts_have_the_form_that_is_asked(api: openai.OpenAI) -> None:
    asked = {**GREEDY, "max_output_tokens": 80, "extra_body": COMPACT}
    with api:
        parsed = api.responses.parse(input="hi", text_format=Person, **asked)
        assert isinstance(parsed.output_parsed, Person)
        with api.responses.stream(input="hi", text_format=Person, **asked) as stream:
            assert stream.get_final_response().output_parsed == parsed.output_parsed
        anything = api.responses.create(input="hi", text={"format": {"type": "json_object"}}, **asked)
        assert anything.status == "incomplete" or isinstance(json.loads(anything.output_text), dict)


def test_logprobs_are_those_of_the_tokens(api: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "max_output_tokens": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with api:
        item: Any = api.responses.create(input="hi", **asked).output[0]
        found = item.content[0].logprobs
        assert "".join(each.token for each in found) == item.content[0].text
        assert [len(each.top_logprobs) for each in found] == [2] * 3
        events = list(api.responses.create(input="hi", stream=True, **asked))
        deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
        assert [each.logprob for part in deltas for each in part] == [each.logprob for each in found]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}], ids=("required", "named"))
def test_forced_calls_are_items(api: openai.OpenAI, choice: Any) -> None:
    """Forced calls are the same items in the stream."""
    asked: Any = {**GREEDY, "max_output_tokens": 100, "tools": [LOOK], "tool_choice": choice, "input": "hi"}
    asked["parallel_tool_calls"] = False
    with api:
        (call,) = api.responses.create(**asked).output
        assert call.type == "function_call" and call.name == "look" and call.status == "completed"
        assert json.loads(call.arguments)["where"] in ("here", "there")
        with api.responses.stream(**asked) as stream:
            events = list(stream)
            (same,) = stream.get_final_response().output
        assert same.type == "function_call" and same.arguments == call.arguments
        done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert done == [call.arguments]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"I look. {CALLING}\n{CALLING}", ["message", "function_call", "function_call"]),
        pytest.param(f"{CALLING} done", ["function_call", "message"], marks=pytest.mark.thorough),
        ("nothing", ["message"]),
        pytest.param(
            f"<think>\nso\n</think>\n\nI look.{CALLING}",
            ["reasoning", "message", "function_call"],
            marks=pytest.mark.thorough,
        ),
        (f"<think>so</think>{CALLING}<think>so</think>", ["reasoning", "function_call", "reasoning"]),
    ],
)
def test_calls_in_a_free_text_are_items(api: openai.OpenAI, text: str, kinds: list[str]) -> None:
    """A forced text has calls, whole and as the package collects a stream."""
    asked: Any = {**GREEDY, "max_output_tokens": 200, "tools": [LOOK], "input": "hi"}
    asked["extra_body"] = {"structured_outputs": {"choice": [text]}}
    with api, ThreadPoolExecutor(2) as threads:  # side by side, in the same steps
        others = [threads.submit(api.responses.create, **asked, **more) for more in ({}, {"tool_choice": "none"})]
        with api.responses.stream(**asked) as stream:
            events = list(stream)
            same: Any = stream.get_final_response()
        whole, as_text = (each.result() for each in others)
    assert [each.type for each in whole.output] == [each.type for each in same.output] == kinds
    thoughts = [each for each in (*whole.output, *same.output) if each.type == "reasoning"]
    assert all(each.content[0].text == "so" and each.content[0].type == "reasoning_text" for each in thoughts)
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == bool(thoughts)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "so" * (len(thoughts) // 2)
    shown = re.sub(r"<think>\s*so\s*</think>\s*", "", text)
    assert whole.output_text == same.output_text == shown.replace(CALLING, "").rstrip("\n")
    calls = [each for each in (*whole.output, *same.output) if each.type == "function_call"]
    assert all(each.name == "look" and json.loads(each.arguments) == {"where": "here"} for each in calls)
    assert all(each.status == "completed" for each in whole.output)
    assert len({each.id for each in same.output}) == len(kinds)
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == list(range(len(kinds)))
    assert as_text.output_text == shown


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported: requests and responses are kept"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "auto"}, "truncation must be disabled"),
        ({"include": ["thoughts"]}, "include may only name"),
        ({"top_logprobs": 3}, "top_logprobs needs include"),
        ({"tools": [{"type": "web_search"}]}, "only functions are supported, not 'web_search'"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "jump"}}, "no tool is named 'jump'"),
        ({"tool_choice": "required"}, "without tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "format.schema is missing"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "items may be message"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role must be user"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "no images"),
        ({"input": [{"type": "function_call", "name": "look"}]}, "a function_call has a name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id of its call"),
        ({"input": 3}, "input: expected"),
        ({"input": [{"role": "user", "content": [{"type": {}, "text": ""}]}]}, "no images"),
        ({"max_output_tokens": 0}, "max_tokens must be"),
        ({"model": "another"}, "does not exist"),
    ],
)
def test_what_is_not_supported_is_one_clear_error(chat_server: RunningServer, wrong: Any, message: str) -> None:
    status, answer = chat_server.request("/v1/responses", {"input": "hi", **wrong})
    assert status in (400, 404) and message in answer["error"]["message"], answer


def test_the_document_tells_bodies_that_are_accepted(chat_server: RunningServer) -> None:
    """fuzz/api.py makes its requests from this document: each route's body, by name, with accepted values."""
    status, found = chat_server.request("/openapi.json")
    assert status == 200
    bodies = found["components"]["schemas"]
    for path, name in (("completions", "Completion"), ("chat/completions", "Chat"), ("responses", "Responses")):
        content = found["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}Request"}
        properties = bodies[f"{name}Request"]["properties"]
        assert properties["model"]["anyOf"][0] == {"enum": [MODEL, "other"]}
        assert properties["temperature"] == {
            "anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}], "default": None,
        }  # fmt: skip
    assert bodies["ResponsesRequest"]["properties"]["prompt"]["anyOf"][0] == {"type": "null"}
    assert bodies["ChatRequest"]["properties"]["messages"]["minItems"] == 1
