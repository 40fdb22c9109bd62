"""Anthropic's Messages API over a plain HTTP client: whole, streamed, with tools and thoughts, counted, refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import MODEL, RunningServer, serving

from fastdecode.core.errors import RequestError
from fastdecode.server.messages_request import CountTokensRequest, Thinking, ToolChoice, chat_of_messages

pytestmark = pytest.mark.slow

HI: list[Any] = [{"role": "user", "content": "hi"}]
LOOK = {
    "name": "look",
    "description": "Look around.",
    "input_schema": {
        "type": "object",
        "properties": {"where": {"enum": ["here", "there"]}},
        "required": ["where"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>{"name": "look", "arguments": {"n": 1180591620717411303424}}</tool_call>'


@pytest.fixture
def client(chat_server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=chat_server.url, timeout=PATIENCE_SECONDS)


def ask(client: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 24, "messages": HI, "temperature": 0, **more}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(client: httpx.Client, **more: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "max_tokens": 24, "messages": HI, "temperature": 0, "stream": True, **more}
    with client.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    kinds, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert kinds == [f"event: {each['type']}" for each in data]
    return data


def added_up(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client joins from a stream, whose events must come in Anthropic's order."""
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "message_stop"
    message, inputs, is_open = found[0]["message"], {}, False
    assert message["content"] == [] and message["stop_reason"] is None
    for event in found[1:-1]:
        kind, index = event["type"], event.get("index")
        if kind == "content_block_start":
            assert index == len(message["content"]) and not is_open
            message["content"].append(event["content_block"])
            is_open = True
        elif kind == "content_block_delta":
            assert index == len(message["content"]) - 1 and is_open
            (name,) = set(event["delta"]) - {"type"}
            wanted = {"text": "text_delta", "thinking": "thinking_delta", "signature": "signature_delta"}
            assert event["delta"]["type"] == wanted.get(name, "input_json_delta")
            if name == "partial_json":
                inputs[index] = inputs.get(index, "") + event["delta"][name]
            else:
                message["content"][index][name] += event["delta"][name]
        elif kind == "content_block_stop":
            assert index == len(message["content"]) - 1 and is_open
            is_open = False
        elif kind == "message_delta":
            assert not is_open and event is found[-2]
            message |= event["delta"]
            message["usage"] = event["usage"]
        else:
            assert kind == "ping"
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def test_a_message_is_the_chat_s_answer(client: httpx.Client, chat_server: RunningServer) -> None:
    """The message and its stream equal the chat's answer, with its tokens counted and the reason for its end."""
    with client:
        found = ask(client, system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}])
        messages = [{"role": "system", "content": "be brief"}, *HI]
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        _, chat = chat_server.request("/v1/chat/completions", body)
        assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        assert (found["type"], found["role"], found["model"]) == ("message", "assistant", MODEL)
        assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
        counted = client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": HI, "system": "be brief"})
        assert counted.json() == {"input_tokens": found["usage"]["input_tokens"]}
        assert found["usage"]["output_tokens"] == 24
        streamed = added_up(events(client, system="be brief"))
        assert {**streamed, "id": ""} == {**found, "id": ""} and streamed["id"] != found["id"]
        stop = found["content"][0]["text"][3:5]
        ended = ask(client, system="be brief", stop_sequences=[stop])
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
        assert stop not in ended["content"][0]["text"]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"<think>\nso\n</think>\n\nI look.{CALL}{CALL}", ["thinking", "text", "tool_use", "tool_use"]),
        pytest.param(CALL, ["tool_use"], marks=pytest.mark.thorough),
        ("I am done", ["text"]),
    ],
)
def test_blocks_come_one_after_another(client: httpx.Client, text: str, kinds: list[str]) -> None:
    asked: dict[str, Any] = {"max_tokens": 300, "tools": [LOOK], "structured_outputs": {"choice": [text]}}
    one_call = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    with client, ThreadPoolExecutor(2) as threads:  # side by side, in the same steps
        others = [threads.submit(ask, client, **asked, **more) for more in ({}, one_call)]
        streamed = added_up(events(client, **asked))
        whole, alone = (each.result() for each in others)
    assert [each["type"] for each in whole["content"]] == kinds
    assert whole["stop_reason"] == streamed["stop_reason"] == ("tool_use" if "tool_use" in kinds else "end_turn")
    for message in (whole, streamed):
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block["name"] == "look" and block["id"]
                assert block["input"] == {"n": 2**70}
            elif block["type"] == "thinking":
                assert block["thinking"] == "so" and block["signature"]
            else:
                assert block["text"] in ("I look.", "I am done")
    assert sum(each["type"] == "tool_use" for each in alone["content"]) == min(1, kinds.count("tool_use"))


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}], ids=("any", "tool"))
def test_calls_can_be_forced(client: httpx.Client, choice: Any) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 100,
        "tools": [LOOK],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    with client:
        whole, streamed = ask(client, **asked), added_up(events(client, **asked))
        cut = ask(client, **{**asked, "max_tokens": 30})
    for message in (whole, streamed):
        assert message["stop_reason"] == "tool_use"
        assert all(each["input"]["where"] in ("here", "there") for each in message["content"])
    assert cut["stop_reason"] in ("tool_use", "max_tokens") and isinstance(cut["content"][0].get("input", {}), dict)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_tokens": None}, "max_tokens: expected"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role must be user or assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "type 'image' are not",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be text, got None"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]}, "must be an object"),
        ({"messages": [{"role": "user", "content": [3]}]}, "a list of blocks"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "got type 'web_search_20250305'"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "jump"}}, "no tool is named 'jump'"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
        ({"output_config": {"format": {"type": "xml"}}}, "format must be"),
        ({"temperature": -1}, "temperature must be"),
        ({"model": "another"}, "does not exist"),
    ],
)
def test_errors_have_anthropic_s_shape(client: httpx.Client, wrong: Any, message: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": HI, **wrong}
    with client:
        for stream in (False, True):
            answer = client.post("/v1/messages", json={**body, "stream": stream})
            error = answer.json()
            kind = "not_found_error" if "model" in wrong else "invalid_request_error"
            assert answer.status_code == (404 if "model" in wrong else 400), error
            assert error["type"] == "error" and error["error"]["type"] == kind
            assert message in error["error"]["message"], error


def test_a_key_comes_in_either_header(tmp_path: Any) -> None:
    with serving(tmp_path, "--api-key", "secret", "--chat-template", "{{ messages[0].content }}") as server:
        body = {"model": "another", "max_tokens": 1, "messages": HI}
        right: list[dict[str, str]] = [{"x-api-key": "secret"}, {"authorization": "Bearer secret"}]
        for headers, status in [*((each, 404) for each in right), ({"x-api-key": "no"}, 401), ({}, 401)]:
            answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers)
            assert answer.status_code == status and answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "secret"}).status_code == 200


def chat(**told: Any) -> Any:
    return chat_of_messages(CountTokensRequest(model="m", **told))


def test_conversations_become_chats() -> None:
    """Results of tools precede the user's text, and thoughts and calls belong to one message."""
    said: list[Any] = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a wall"}]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                {"type": "text", "text": "and"},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "be brief"}]
    found = chat(messages=said, system=system, thinking=Thinking("disabled"))
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": "é"}'}}
    assert found.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a wall"},
        {"role": "tool", "tool_call_id": "c2", "content": "error"},
        {"role": "user", "content": "and\nnow?"},
    ]
    assert found.chat_template_kwargs == {"enable_thinking": False, "thinking": False} and found.add_generation_prompt
    begun = chat(messages=[*HI, {"role": "assistant", "content": "It is"}])
    assert begun.continue_final_message and not begun.add_generation_prompt
    none = chat(messages=HI, tools=[LOOK], tool_choice=ToolChoice("none"))
    assert none.tool_choice == "none" and none.tools[0]["function"]["parameters"] == LOOK["input_schema"]
    with pytest.raises(RequestError, match="tool_use_id of a block"):
        chat(messages=[{"role": "user", "content": [{"type": "tool_result"}]}])
