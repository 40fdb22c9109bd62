"""Calls that ``tool_choice`` forces: their form, the reading of their text, and chats answered with them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from helpers.servers import MODEL, RunningServer

from fastdecode.core.errors import RequestError
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.call_parts import CallPart
from fastdecode.server.response_templates import answer_syntax
from fastdecode.server.responses_request import messages_of
from fastdecode.server.tool_calls import CallReader, ForcedCalls, forced_calls

pytestmark = pytest.mark.slow

COUNT: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/number"}, "loud": {"type": "boolean"}},
    "required": ["to", "loud"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer", "minimum": 1, "maximum": 99}},
}
LOOK: dict[str, Any] = {"type": "object", "properties": {"é": {"enum": ["}]", '"']}}, "required": ["é"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "count", "parameters": COUNT}},
    {"type": "function", "function": {"name": "look", "parameters": {**LOOK, "additionalProperties": False}}},
]
NAMED: Any = {"type": "function", "function": {"name": "count"}}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def check_arguments(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "count":
        assert set(found) == {"to", "loud"} and 1 <= found["to"] <= 99 and isinstance(found["loud"], bool)
    else:
        assert name == "look" and found["é"] in ("}]", '"')


def ask(api: openai.OpenAI, choice: Any, **more: Any) -> Any:
    asked = {"max_tokens": 200, "temperature": 0, **more}
    return api.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **asked
    )


def streamed(events: Any) -> tuple[list[dict[str, str]], str, int]:
    """Return a stream's calls, its reason for the end, and in how many parts they came."""
    calls: list[dict[str, str]] = []
    reason, parts = "", 0
    for event in events:
        (choice,) = event.choices
        assert not choice.delta.content
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or ():
            parts += 1
            if delta.id:
                assert delta.index == len(calls) and delta.type == "function"
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments
    return calls, reason, parts


def test_a_named_function_is_called(chat_server: RunningServer) -> None:
    """The call comes whole, token by token, in several samples, and says if it was cut off."""
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as api:
        choice = ask(api, NAMED).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.message.content is None and choice.finish_reason == "stop" and call.function.name == "count"
        check_arguments("count", call.function.arguments)
        calls, reason, parts = streamed(ask(api, NAMED, stream=True))
        assert [each["arguments"] for each in calls] == [call.function.arguments]
        assert calls[0]["name"] == "count" and reason == "stop" and parts > 5
        for each in ask(api, NAMED, n=4, temperature=2, seed=1).choices:
            check_arguments("count", each.message.tool_calls[0].function.arguments)
        for stream in (False, True):
            cut = ask(api, NAMED, max_tokens=5, stream=stream)
            cut = streamed(cut) if stream else cut.choices[0]
            text = cut[0][0]["arguments"] if stream else cut.message.tool_calls[0].function.arguments
            assert text == call.function.arguments[:5] and (cut[1] if stream else cut.finish_reason) == "length"


def test_some_function_must_be_called(chat_server: RunningServer) -> None:
    """In time both functions are called, and a text that is cut off gives the last call as far as it goes."""
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as api:
        choice = ask(api, "required").choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        check_arguments(call.function.name, call.function.arguments)
        calls, reason, _ = streamed(ask(api, "required", stream=True))
        assert [(each["name"], each["arguments"]) for each in calls] == [(call.function.name, call.function.arguments)]
        assert reason == "tool_calls"
        several = ask(
            api, "required", n=8, temperature=2, seed=2, max_tokens=120, extra_body={"parallel_tool_calls": True}
        )
        found = [each.message.tool_calls for each in several.choices if each.message.tool_calls]
        ends = [each.finish_reason for each in several.choices if each.message.tool_calls]
        assert "length" in ends
        for calls, end in zip(found, ends, strict=True):
            for each in calls[: -1 if end == "length" else None]:
                check_arguments(each.function.name, each.function.arguments)
        assert {each.function.name for calls in found for each in calls} == {"count", "look"}
        assert len({each.id for calls in found for each in calls}) == sum(map(len, found))
        for stream in (False, True):
            cut = ask(api, "required", max_tokens=len('[{"name":"count","parameters":{"') + 1, stream=stream)
            calls, reason, _ = streamed(cut) if stream else ([], cut.choices[0].finish_reason, 0)
            (begun,) = (
                [each["arguments"] for each in calls]
                if stream
                else [each.function.arguments for each in cut.choices[0].message.tool_calls]
            )
            assert reason == "length" and begun.startswith("{") and call.function.arguments.startswith(begun)


def test_a_text_is_free_where_no_call_is_forced(chat_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as api:
        for choice in ("auto", "none"):
            message = ask(api, choice, max_tokens=5).choices[0].message
            assert message.content and message.tool_calls is None


CALLING = '<tool_call>\n{"name": "look", "arguments": {"a": "é}"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"I look. {CALLING}\n{CALLING} done", "I look.  done", [("look", {"a": "é}"})] * 2),
        (f"{CALLING}\n{CALLING}", "", [("look", {"a": "é}"})] * 2),
        ('<tool_call>[{"name": "look", "arguments": {}}]', "", [("look", {})]),
        (' {"name": "look", "parameters": {"b": [1]}} ', "", [("look", {"b": [1]})]),
        ('[{"name": "look", "arguments": {}}, {"name": "jump", "arguments": {}}]', "", [("look", {}), ("jump", {})]),
        ('{"name": "run", "arguments": {}}', '{"name": "run", "arguments": {}}', []),
        ("<tool_call>look</tool_call> <tool", "<tool_call>look</tool_call> <tool", []),
        ("{ x <tool_call", "{ x <tool_call", []),
        ("a < b", "a < b", []),
    ],
)
def test_calls_in_free_texts_are_read_however_these_grow(text: str, shown: str, calls: list[Any]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "jump")]
    for size in range(1, len(text) + 1):
        free = AnswerReading(syntax=answer_syntax("", "", None), tools=tools).reader("a")
        read: list[Any] = []
        for end in [*range(size, len(text), size), len(text)]:
            read += free.read(text[:end], end == len(text))
        found = "".join(each for each in read if isinstance(each, str))
        parts = [each for each in read if isinstance(each, CallPart)]
        assert [(part.name, json.loads(part.arguments)) for part in parts] == calls
        assert [part.index for part in parts] == list(range(len(calls)))
        assert "".join(found.split()) == "".join(shown.split())
        assert calls or found == shown


def test_a_model_that_calls_of_itself_is_answered_with_its_calls(chat_server: RunningServer) -> None:
    """The model's text is forced here to be a call, whole and streamed."""
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as api:
        body: dict[str, Any] = {
            "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 100,
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
            "extra_body": {"structured_outputs": {"choice": [CALLING]}},
        }  # fmt: skip
        (choice,) = api.chat.completions.create(**body).choices
        (call,) = choice.message.tool_calls or ()
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"a": "é}"})
        calls, reason, _ = streamed(api.chat.completions.create(stream=True, **body))
        assert reason == "tool_calls"
        assert [(each["name"], json.loads(each["arguments"])) for each in calls] == [("look", {"a": "é}"})]
        (choice,) = api.chat.completions.create(**{**body, "tool_choice": "none"}).choices
        assert choice.message.content == CALLING and not choice.message.tool_calls


def reader(name: str | None) -> CallReader:
    forced = forced_calls(TOOLS, "required" if name is None else NAMED)
    assert isinstance(forced, ForcedCalls)
    return CallReader(forced, "a")


def test_calls_are_read_as_they_grow() -> None:
    """Each call is reported once, when its last brace has come, with its text unchanged, whatever the pieces."""
    arguments = ['{"to":1e400,"loud":true}', '{"é":"}]"}', '{"é":"\\""}']
    names = ["count", "look", "look"]
    told = [f'{{"name":"{name}","parameters":{each}}}' for name, each in zip(names, arguments, strict=True)]
    text = f"[{','.join(told)}]"
    for step in (1, 2, 7, len(text)):
        one, found = reader(None), []
        for end in [*range(0, len(text), step), len(text)]:
            complete = [number for number in range(3) if len(",".join(told[: number + 1])) + 1 <= end]
            found += one.read(text[:end], end == len(text))
            assert [each.index for each in found] == complete
        assert [(each.name, each.arguments) for each in found] == list(zip(names, arguments, strict=True))
        assert all(each.first and each.complete for each in found) and len({each.call_id for each in found}) == 3
    one = reader("count")
    parts = [one.read(arguments[0][:end], end == 24)[0] for end in (0, 4, 24)]
    assert "".join(each.arguments for each in parts) == arguments[0] and len({each.call_id for each in parts}) == 1
    assert [(each.first, each.complete) for each in parts] == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (None, "required", "without tools"),
        ([], NAMED, "without tools"),
        (TOOLS, "count", "tool_choice must be none, auto, required or"),
        (TOOLS, {"type": "allowed_tools"}, "tool_choice must be none, auto, required or"),
        (TOOLS, {"type": "function", "function": {"name": "jump"}}, "no tool is named 'jump'; there are count, look"),
        ([{"type": "custom", "name": "count"}], "required", "tools must be a list of"),
        ([*TOOLS, TOOLS[0]], "required", "each with a name of its own"),
        ([{"type": "function", "function": {"name": "f", "parameters": 3}}], "required", "tools must be a list of"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 3}}}],
            "required",
            "must be an object",
        ),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forced_calls(tools, choice)


def test_a_form_beside_a_forced_call(chat_server: RunningServer) -> None:
    """Another form is refused; ``response_format`` is for text, and a forced call has none."""
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 100}
    status, answer = chat_server.request("/v1/chat/completions", {**asked, "structured_outputs": {"regex": "a"}})
    assert status == 400 and "give one" in answer["error"]["message"]
    status, answer = chat_server.request("/v1/chat/completions", {**asked, "response_format": {"type": "json_object"}})
    assert status == 200
    check_arguments("count", answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])


def test_items_of_responses_become_messages() -> None:
    """Calls join the assistant's message before them."""
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "look", "arguments": "{}"} for i in range(2)]
    output = {"type": "function_call_output", "call_id": "c0", "output": [{"type": "input_text", "text": "a wall"}]}
    begun = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    found = messages_of([{"role": "user", "content": "hi"}, begun, *calls, output, calls[0]])
    told = [{"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in range(2)]
    assert found == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": told},
        {"role": "tool", "tool_call_id": "c0", "content": "a wall"},
        {"role": "assistant", "content": "", "tool_calls": told[:1]},
    ]


THINKING = "<think>\nI look at 😀\n</think>\n\nSo:\n"


def test_thoughts_and_calls_of_a_chat(chat_server: RunningServer) -> None:
    """Thoughts come whole and streamed, by both names; clients that want no thoughts get none."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body: dict[str, Any] = {
        "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "tools": tools,
        "structured_outputs": {"choice": [THINKING + CALLING]},
    }  # fmt: skip
    status, answer = chat_server.request("/v1/chat/completions", body)
    assert status == 200
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("So:", "I look at 😀")
    assert message["reasoning"] == message["reasoning_content"]
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as api:
        told = dict.fromkeys(("reasoning", "reasoning_content", "content"), "")
        calls: list[Any] = []
        more = {"structured_outputs": body["structured_outputs"]}
        asked: dict[str, Any] = {**body, "model": MODEL, "extra_body": more, "stream": True}
        del asked["structured_outputs"]
        for event in api.chat.completions.create(**asked):
            delta = event.choices[0].delta
            told = {name: text + (getattr(delta, name, None) or "") for name, text in told.items()}
            calls += delta.tool_calls or []
        assert told == {"reasoning": "I look at 😀", "reasoning_content": "I look at 😀", "content": "So:"}
        assert [each.function.arguments for each in calls] == ['{"a": "é}"}'] and message["tool_calls"]
        whole = api.chat.completions.create(**{**asked, "extra_body": {**more, "include_reasoning": False}})
        assert not any(getattr(event.choices[0].delta, "reasoning_content", None) for event in whole)


@pytest.mark.parametrize(
    ("arguments", "wanted"), [('{"a": "\\ud83d b"}', '{"a": "\ufffd b"}'), ('{"a": NaN}', None), ('{"a": 1e999}', None)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_arguments_of_clients_are_json_in_utf_8(
    chat_server: RunningServer, arguments: str, wanted: str | None, stream: bool
) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as api:
        body: dict[str, Any] = {
            "model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 100, "stream": stream,
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
            "extra_body": {"structured_outputs": {"choice": [text]}},
        }  # fmt: skip
        found = api.chat.completions.create(**body)
        said = [event.choices[0].delta for event in found] if stream else [found.choices[0].message]
        calls = [each.function.arguments for part in said for each in part.tool_calls or ()]
        assert calls == ([wanted] if wanted else [])
        assert "".join(part.content or "" for part in said) == ("" if wanted else text)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]},
        {"properties": {"b": {"$ref": "#/$defs/x%20y"}}, "required": ["b"], "$defs": {"x y": {"enum": [1, 2]}}},
        {"properties": {"b": {"anyOf": [{"enum": [1, 2]}, {"$ref": "#"}]}}, "required": ["b"]},
        {
            "$id": "http://t/s",
            "properties": {"b": {"$ref": "s#/$defs/x"}},
            "required": ["b"],
            "$defs": {"x": {"enum": [1]}},
        },
        {"properties": {"b": {"$ref": "#x"}}, "required": ["b"], "$defs": {"x": {"$anchor": "x", "enum": [1, 2]}}},
    ],
    ids=("property", "definition", "root", "id", "anchor"),
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "t"}}], ids=("any", "named"))
def test_references_of_a_schema_are_its_own(chat_server: RunningServer, schema: Any, choice: Any) -> None:
    """Another function beside it uses the same names."""
    schema = {"type": "object", "additionalProperties": False, **schema}
    other = {"type": "object", "properties": {"a": {"type": "null"}}, "$defs": {"x": {"type": "null"}}}
    functions = [{"name": "t", "parameters": schema}]
    if choice != "required":
        functions.append({"name": "other", "parameters": other})
    body = {
        "messages": MESSAGES, "temperature": 1, "seed": 3, "max_tokens": 200, "tool_choice": choice,
        "parallel_tool_calls": False, "tools": [{"type": "function", "function": each} for each in functions],
    }  # fmt: skip
    status, answer = chat_server.request("/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    found: Any = None
    for call in choice["message"]["tool_calls"]:
        found = json.loads(call["function"]["arguments"]) if choice["finish_reason"] != "length" else {"b": 1}
        while isinstance(found, dict):
            assert set(found) <= {"a", "b"}
            found = found["b"]
        assert found in (1, 2)
    assert found
