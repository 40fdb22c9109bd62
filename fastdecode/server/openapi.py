"""The server's OpenAPI document describes allowed request bodies as precisely as a JSON schema can.

Bodies are decoded by their structs, and values are checked where they are used, with better messages. This module only
describes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from fastdecode.server.messages_request import CountTokensRequest, MessagesRequest
from fastdecode.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from fastdecode.server.responses_request import LOGPROBS, ResponsesRequest

BODIES = (
    CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountTokensRequest, TokenizeRequest,
    DetokenizeRequest,
)  # fmt: skip

Schema = dict[str, Any]


def takes(kind: type[msgspec.Struct]) -> Schema:
    """Return a route's ``openapi_extra``: the route takes a JSON body of the struct ``kind``."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, model_names: Sequence[str], vocab_size: int) -> Schema:
    """Return FastAPI's OpenAPI document of ``app``'s routes, completed with the schemas of request bodies."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    found.setdefault("components", {}).setdefault("schemas", {}).update(_schemas(model_names, vocab_size))
    return found


def _schemas(model_names: Sequence[str], vocab_size: int) -> Schema:
    """Return the JSON schema of each body struct by the struct's name. Properties with default None may be null."""
    _, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    told = _properties(model_names, vocab_size)
    for kind in BODIES:
        properties = components[kind.__name__]["properties"]
        for name, schema in {**told, **told.get(kind.__name__, {})}.items():
            if name in properties:
                null = [_NULL] if properties[name].get("default", "") is None else []
                default = {"default": properties[name]["default"]} if "default" in properties[name] else {}
                properties[name] = {"anyOf": [schema, *null], **default} if null else {**schema, **default}
    return components


def _numbers(kind: str, least: float | None = None, most: float | None = None, **more: float) -> Schema:
    bounds = {"minimum": least, "maximum": most, **more}
    return {"type": kind, **{key: value for key, value in bounds.items() if value is not None}}


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _object(required: Sequence[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT = {"type": "string", "minLength": 1}
_NULL = {"type": "null"}
_IS_FUNCTION = {"const": "function"}
_MESSAGE = _object(
    ("role", "content"),
    role={"enum": ["system", "user", "assistant", "tool"]},
    content={"anyOf": [{"type": "string"}, _list(_object(("type", "text"), type={"const": "text"}, text=_TEXT))]},
    tool_calls=_list(_object(("function",), function=_object(("name",), name=_TEXT, arguments={"const": "{}"}))),
)
_FUNCTION: Schema = {"name": _TEXT, "description": {"type": "string"}, "parameters": {"type": "object"}}
_CHOICES = ["none", "auto", "required"]


def _properties(model_names: Sequence[str], vocab_size: int) -> Schema:
    """Return the JSON schemas of body fields by field name.

    A field with another meaning in one kind of body is listed under that body's name.
    """
    token_ids = _list(_numbers("integer", 0, vocab_size - 1), 1)
    named = _object(("name",), name=_TEXT)
    return {
        "model": {"enum": list(model_names)},
        "n": _numbers("integer", 1, 128),
        "temperature": _numbers("number", 0, 2),
        "top_p": _numbers("number", maximum=1, exclusiveMinimum=0),
        "top_k": _numbers("integer", -1, 1000),
        "min_p": _numbers("number", 0, 1),
        "repetition_penalty": _numbers("number", 0.01, 100),
        "presence_penalty": _numbers("number", -2, 2),
        "frequency_penalty": _numbers("number", -2, 2),
        "seed": _numbers("integer", -(2**63), 2**64 - 1),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _numbers("integer", 1)),
        "min_tokens": _numbers("integer", 0),
        "stop": {"anyOf": [_TEXT, _list(_TEXT)]},
        "bad_words": _list(_TEXT),
        **dict.fromkeys(
            ("stop_token_ids", "allowed_token_ids", "tokens"), _list(_numbers("integer", 0, vocab_size - 1))
        ),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": _numbers("number", -100, 100),
        },
        "top_logprobs": _numbers("integer", 0, 20),
        "messages": _list(_MESSAGE, 1),
        "tools": _list(_object(("type", "function"), type=_IS_FUNCTION, function=_object(("name",), **_FUNCTION))),
        "tool_choice": {
            "anyOf": [{"enum": _CHOICES}, _object(("type", "function"), type=_IS_FUNCTION, function=named)]
        },
        "chat_template_kwargs": {"type": "object", "maxProperties": 0},
        "CompletionRequest": {
            "prompt": {"anyOf": [_TEXT, token_ids, _list(_TEXT, 1), _list(token_ids, 1)]},
            "logprobs": _numbers("integer", 0, 20),
        },
        "ResponsesRequest": _of_responses(),
        "MessagesRequest": _of_messages(),
        "CountTokensRequest": _of_messages(),
    }


def _of_responses() -> Schema:
    """Return the JSON schemas of fields that have another meaning in a body of the Responses API."""
    part = _object(("type", "text"), type={"enum": ["input_text", "output_text"]}, text={"type": "string"})
    item = {**_MESSAGE["properties"], "content": {"anyOf": [{"type": "string"}, _list(part)]}}
    item["role"] = {"enum": ["system", "user", "assistant", "developer"]}
    return {
        "input": {"anyOf": [_TEXT, _list(_object(("role", "content"), **item), 1)]},
        "include": _list({"const": LOGPROBS}),
        "tools": _list(_object(("type", "name"), type=_IS_FUNCTION, **_FUNCTION)),
        "tool_choice": {"anyOf": [{"enum": _CHOICES}, _object(("type", "name"), type=_IS_FUNCTION, name=_TEXT)]},
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), _NULL),
        "store": {"type": "boolean"},
        "background": {"const": False},
        "truncation": {"const": "disabled"},
    }


def _of_messages() -> Schema:
    """Return the JSON schemas of fields that have another meaning in bodies of Anthropic's API."""
    blocks = _list(_object(("type", "text"), type={"const": "text"}, text=_TEXT), 1)
    text = {"anyOf": [_TEXT, blocks]}
    told: Schema = {"name": _TEXT, "description": {"type": "string"}, "input_schema": {"type": "object"}}
    return {
        "messages": _list(_object(("role", "content"), role={"const": "user"}, content=text), 1),
        "system": text,
        "stop_sequences": _list(_TEXT),
        "tools": _list(_object(("name", "input_schema"), **told)),
        "tool_choice": _object(("type",), type={"enum": ["auto", "none"]}),
        "output_config": {"type": "object", "maxProperties": 0},
        "mcp_servers": _NULL,
    }
