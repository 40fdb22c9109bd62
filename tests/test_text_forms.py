"""Bodies of requests: forms of texts, schemas that allow no other keys, numbers, and messages sent back."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from fastdecode.api.conversations import check_nothing_is_left_out, with_known_roles, without_empty_fields
from fastdecode.api.json_schemas import inexact_number, without_other_keys
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read_body,
    sampling_params,
)
from fastdecode.server.responses_request import ResponsesRequest, chat_of, messages_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}


def form(kind: type[Any] = ChatRequest, **body: Any) -> StructuredOutputsParams | None:
    asked = {"prompt": "x", **body} if kind is CompletionRequest else {"messages": [], **body}
    return sampling_params(read_body(asked, kind)[0], {}).structured_outputs


def json_form(schema: Any, strict: bool = False) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, disable_additional_properties=strict)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_schema_counts_wherever_clients_put_it(kind: type[Any]) -> None:
    for told in (
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "name": "x"},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}},
    ):
        assert form(kind, response_format=told) == json_form(SCHEMA)
    for strict in ({"schema": SCHEMA, "strict": True}, {"json_schema": {"schema": SCHEMA, "strict": True}}):
        assert form(kind, response_format={"type": "json_schema", **strict}) == json_form(SCHEMA, True)
    assert form(kind, response_format={"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    assert form(kind, response_format={"type": "text"}) is None is form(kind)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"type": "json_object", "scheme": SCHEMA}, "unknown field `scheme`"),
        ({"type": "json_object", "regex": "a"}, "unknown field `regex`"),
        ({"type": "json_schema", "json_schema": {"schemas": SCHEMA}}, "unknown field `schemas`"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema is missing"),
        ({"type": "json_object", "json_schema": {"name": "x"}}, "schema is missing"),
        ({"type": "json_schema"}, "schema is missing"),
        ({"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}, "exclude each other"),
        ({"type": "text", "schema": SCHEMA}, "takes no schema"),
        ({"type": "regex", "pattern": "a"}, "invalid enum value 'regex'"),
    ],
)
def test_a_form_that_is_not_understood_is_refused(told: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        form(response_format=told)


def test_responses_have_the_same_forms() -> None:
    def asked(**told: Any) -> StructuredOutputsParams | None:
        body, _ = read_body({"input": "x", "text": {"format": told}}, ResponsesRequest)
        return sampling_params(chat_of(body, messages_of(body.input)), {}).structured_outputs

    assert asked(type="json_object", schema=SCHEMA) == json_form(SCHEMA)
    assert asked(type="json_schema", schema=SCHEMA, strict=True) == json_form(SCHEMA, True)
    for told, message in (
        ({"type": "json_schema", "json_schema": {}}, "unknown"),
        ({"type": "text", "schema": {}}, "no"),
    ):
        with pytest.raises(RequestError, match=message):
            asked(**told)


def test_vllms_own_form_says_for_itself_whether_other_keys_are_taken() -> None:
    assert form(structured_outputs={"json": SCHEMA, "regex": None, "whitespace_pattern": None}) == json_form(SCHEMA)
    told = {"json": SCHEMA, "disable_additional_properties": True}
    assert form(structured_outputs=told) == json_form(SCHEMA, True)
    assert json_form(SCHEMA, True).json == json_form(CLOSED).json
    with pytest.raises(RequestError, match="whitespace_pattern is not understood"):
        form(structured_outputs={"json": SCHEMA, "whitespace_pattern": " "})


INNER = {"type": "object", "properties": {"b": {}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (SCHEMA, [{}, {"a": 1}], [{"a": 1, "x": 1}]),
        ({"type": "object", "properties": {"o": INNER}}, [{"o": {"b": 1}}], [{"o": {"x": 1}}]),
        ({"type": "array", "items": INNER}, [[{"b": 1}]], [[{"x": 1}]]),
        ({"anyOf": [INNER, {"type": "integer"}]}, [{"b": 1}, 3], [{"x": 1}]),
        ({"oneOf": [INNER, SCHEMA]}, [{"a": 1}], [{"x": 1}]),
        ({"allOf": [INNER]}, [{"b": 1}], [{"x": 1}]),
        ({"$ref": "#/$defs/i", "$defs": {"i": INNER}}, [{"b": 1}], [{"x": 1}]),
        ({"type": "object", "properties": {"o": {"$ref": "#/definitions/i"}}, "definitions": {"i": INNER}},
         [{"o": {"b": 1}}], [{"o": {"x": 1}}]),
        ({"type": "object"}, [{}, {"x": 1}], []),
        ({**SCHEMA, "additionalProperties": True}, [{"x": 1}], []),
        ({**SCHEMA, "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "y"}]),
        ({**SCHEMA, "patternProperties": {"^x": {}}}, [{"x": 1}], [{"y": 1}]),
        ({"type": "object", "properties": {"properties": INNER}}, [{"properties": {"b": 1}}], [{"x": 1}]),
        ({"allOf": [INNER, SCHEMA]}, [{"a": 1, "b": 2}], []),
        ({"allOf": [{"$ref": "#/$defs/i"}, SCHEMA], "$defs": {"i": INNER}}, [{"a": 1, "b": 2}], []),
        ({**SCHEMA, "anyOf": [INNER, {"required": ["a"]}]}, [{"a": 1, "b": 2}], []),
        ({"const": {"properties": {}}}, [{"properties": {}}], []),
    ],
)  # fmt: skip
def test_closed_schemas_take_no_keys_that_they_do_not_list(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """A closed schema also accepts all listed keys that the open schema accepts."""
    check = jsonschema.Draft202012Validator(without_other_keys(schema))
    assert all(map(check.is_valid, good)) and not any(map(check.is_valid, bad))


@pytest.mark.parametrize(
    ("schema", "is_exact"),
    [
        ({"type": "integer", "minimum": 9007199254740993}, False),
        ({"maximum": -(2**53) - 1}, False),
        ({"exclusiveMaximum": 1e19}, False),
        ({"multipleOf": 2**60}, False),
        ({"const": 9007199254740993}, False),
        ({"enum": ["a", -(2**63)]}, False),  # llguidance crashes at this number.
        ({"const": {"a": [2**64]}}, False),
        ({"properties": {"a": {"anyOf": [{"items": {"minimum": 2**54}}]}}}, False),
        ({"properties": {"default": {"const": 2**54}}}, False),
        ({"$defs": {"a": {"const": 2**54}}}, False),
        ({"minimum": -(2**53), "maximum": 2**53, "default": 2**60, "examples": [2**60]}, True),
        ({"properties": {"minimum": {"type": "integer"}, "maximum": True}}, True),
    ],
)
def test_numbers_that_would_be_rounded_are_refused(schema: Any, is_exact: bool) -> None:
    assert (inexact_number(schema) is None) == is_exact
    if not is_exact:
        with pytest.raises(ConfigError, match="beyond 9007199254740992"):
            StructuredOutputsParams(json=schema)


def test_numbers_in_a_grammar_s_schemas_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"numbers in %json may be up to"):
        StructuredOutputsParams(grammar='start: %json {"enum": [-9223372036854775808]}')
    assert StructuredOutputsParams(grammar='start: "12345678901234567890"').grammar


def test_whole_numbers_may_have_a_fraction_of_zero() -> None:
    """Integers are accepted so at any depth, and all else stays as it came."""
    body = {
        "prompt": [[1.0, 2], [3.0]], "max_tokens": 4.0, "n": 1e0, "stop_token_ids": [5.0, 6], "temperature": 1.0,
        "logprobs": 2.0, "seed": -7.0, "structured_outputs": {"json": {"const": 4.0}}, "logit_bias": {"3": 1.0},
    }  # fmt: skip
    read, _ = read_body(body, CompletionRequest)
    assert (read.prompt, read.max_tokens, read.n, read.stop_token_ids) == ([[1, 2], [3]], 4, 1, [5, 6])
    assert (read.logprobs, read.seed) == (2, -7) and all(type(each) is int for each in read.prompt[0])
    assert type(read.structured_outputs["json"]["const"]) is float and type(read.temperature) is float
    chat, _ = read_body({"messages": [{"x": 1.0}], "max_completion_tokens": 8.0, "top_logprobs": 1.0}, ChatRequest)
    assert (chat.max_completion_tokens, chat.top_logprobs) == (8, 1) and type(chat.messages[0]["x"]) is float
    assert read_body({"input": "x", "max_output_tokens": 9.0}, ResponsesRequest)[0].max_output_tokens == 9
    assert read_body({"tokens": [1.0, 2.0]}, DetokenizeRequest)[0].tokens == [1, 2]
    for wrong in (4.5, "4", True, float("inf")):
        with pytest.raises(RequestError, match="max_tokens: expected"):
            read_body({"prompt": "x", "max_tokens": wrong}, CompletionRequest)


def test_empty_fields_of_messages_are_left_out() -> None:
    sent = {"role": "assistant", "content": "a", "tool_calls": [], "refusal": None, "annotations": [], "name": "n"}
    assert without_empty_fields(sent) == {"role": "assistant", "content": "a", "name": "n"}
    assert without_empty_fields({"role": "user", "content": None}) == {"role": "user", "content": None}
    refused = {"role": "assistant", "content": None, "refusal": "I cannot"}
    assert without_empty_fields(refused) == {"role": "assistant", "content": "I cannot"}
    called = without_empty_fields({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}})
    assert called["tool_calls"][0]["function"]["name"] == "f" and "function_call" not in called
    assert without_empty_fields({"role": "function", "name": "f", "content": "3"})["role"] == "tool"


def said(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": role[0]} for role in roles]


def test_developers_speak_as_the_system_where_templates_know_only_that() -> None:
    known = "{% if m.role == 'system' %}"
    assert with_known_roles(said("developer", "user"), known) == [{"role": "system", "content": "d"}, *said("user")]
    merged = with_known_roles(said("system", "developer", "user", "developer"), known)
    assert merged == [{"role": "system", "content": "s\n\nd"}, *said("user"), {"role": "system", "content": "d"}]
    for messages in (said("system", "system", "user"), said("user", "assistant")):
        assert with_known_roles(messages, known) == messages
    messages = said("system", "developer", "user")
    assert with_known_roles(messages, "{% if m.role == 'developer' %}") == messages


def test_messages_that_the_template_leaves_out_are_refused() -> None:
    def render(messages: list[dict[str, Any]]) -> str:
        return "".join(each["content"].upper() for each in messages if each["role"] in ("user", "assistant"))

    fine = said("user", "assistant", "user")
    check_nothing_is_left_out(fine, render(fine), render)
    check_nothing_is_left_out(said("assistant"), "", render)
    lower = [{"role": "user", "content": "<&>"}]
    check_nothing_is_left_out(lower, "&lt;&amp;&gt; mark0mark", lambda messages: messages[0]["content"])
    for role in ("system", "tool", "bot"):
        with pytest.raises(RequestError, match=f"leaves out messages of role '{role}'"):
            check_nothing_is_left_out(messages := said(role, "user"), render(messages), render)


def test_what_codex_sends_back_is_taken() -> None:
    """Thoughts, refusals and names of ``include`` add nothing, and instructions join the developer's message."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    body, _ = read_body(
        {"input": items, "instructions": "i", "include": ["reasoning.encrypted_content"]}, ResponsesRequest
    )
    chat = chat_of(body, messages_of(body.input))
    told = with_known_roles(chat.messages, "system")
    assert told == [{"role": "system", "content": "i\n\nd"}, *said("user"), {"role": "assistant", "content": "no"}]
    (system, *_) = chat_of(body, [{"role": "system", "content": "s"}, *said("user")]).messages
    assert system == {"role": "system", "content": "i\n\ns"}


def test_tokenize_is_told_what_a_chat_is() -> None:
    fields = set(ChatRequest.__struct_fields__)
    wanted = {"tools", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
    wanted |= {"reasoning_effort", "add_special_tokens"}
    assert wanted <= fields and wanted <= set(TokenizeRequest.__struct_fields__)
