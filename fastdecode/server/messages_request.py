"""Requests of Anthropic's Messages API: the body, and the corresponding chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from fastdecode.core.errors import RequestError
from fastdecode.server.protocol import ChatRequest, Messages, SampledRequest
from fastdecode.server.text_forms import JsonSchema, ResponseFormat

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"


class ToolChoice(msgspec.Struct):
    """The tools that the model may or must call. ``name``: the tool to call, if the type is "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """A switch for reasoning, for chat templates that support it. ``budget_tokens`` is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    """``format``: {"type": "json_schema", "schema": …}. ``effort``: for chat templates that take one."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """A prompt whose tokens a client wants counted. ``messages``: text, reasoning, tool calls and their results."""

    model: str
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(SampledRequest, kw_only=True):
    """A prompt, and how to answer it: Anthropic's fields, and vLLM's additional ones."""

    model: str
    max_tokens: int
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None


def chat_of_messages(request: MessagesRequest | CountTokensRequest) -> ChatRequest:
    """Return ``request`` as a request of OpenAI's chat API. Raise RequestError for unsupported or invalid values."""
    if request.mcp_servers:
        raise RequestError("mcp_servers is not supported: connect to them from the client, and give their tools")
    choice, messages = request.tool_choice, _system(request.system) + _messages(request.messages)
    continues = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    config = request.output_config or OutputConfig()
    asked: dict[str, Any] = {
        "messages": messages,
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": _choice(choice) if choice and request.tools else None,
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
        "chat_template_kwargs": {**_thinking(request.thinking), **(request.chat_template_kwargs or {})} or None,
        "response_format": _format(config.format),
        "reasoning_effort": config.effort,
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
    }
    # Fields that ChatRequest has under the same name
    same = tuple(sorted({*SampledRequest.__struct_fields__} - {"stop"}))
    if isinstance(request, MessagesRequest):
        stops = request.stop_sequences if request.stop is None else request.stop
        asked |= {"max_tokens": request.max_tokens, "stop": stops}
        asked |= {name: getattr(request, name) for name in same}
    return ChatRequest(**asked)


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    texts = [system] if isinstance(system, str) else [_text(block, "system") for block in system or ()]
    # A system text with this beginning is a billing header: no instruction, and different in each request
    billing = "x-anthropic-billing-header"
    told = [text for text in texts if text and not text.startswith(billing)]
    return [{"role": "system", "content": "\n".join(told)}] if told else []


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in given:
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"messages: role must be user or assistant, got {role!r:.80}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise RequestError("messages: content must be text or a list of blocks")
        if role == "system":
            found += _system(content)
        else:
            found += _assistant(content) if role == "assistant" else _user(content)
    return found


def _user(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a user message's ``blocks`` as chat messages of the roles tool and user. Join adjacent texts."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            found.append(_result(block))
            continue
        text = _text(block, "messages")
        if found and found[-1]["role"] == "user":
            found[-1]["content"] += "\n" + text
        else:
            found.append({"role": "user", "content": text})
    return found or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking"))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":
            texts.append(_text(block, "messages"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    parts = [content] if isinstance(content, str) else [_text(each, "tool_result") for each in content or ()]
    text = "\n".join(parts) or ("error" if block.get("is_error") else "")
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": text}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestError(f"messages: input of a tool_use must be an object, got {given!r:.80}")
    function = {"name": _string(block, "name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _text(block: Any, where: str) -> str:
    """Return the text of ``block``. Raise RequestError, naming ``where``, if the block is no text."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    source = block.get("source") if kind == "document" else None
    if isinstance(source, Mapping) and source.get("type") == "text":
        return _string(source, "data")
    if kind != "text":
        raise RequestError(f"{where}: blocks of type {kind!r:.80} are not supported: the model takes text only")
    return _string(block, "text")


def _string(block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{name} of a block of type {block.get('type')!r:.80} must be text, got {value!r:.80}")
    return value


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None) or not isinstance(tool.get("input_schema"), dict):
        kind = tool.get("type", "custom")
        raise RequestError(
            f'tools: must be {{"name": …, "input_schema": JSON schema}}, which the client runs, got type {kind!r:.80}'
        )
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {name: tool[key] for key, name in names.items() if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """Return the chat template's arguments that switch reasoning on or off; {} if ``thinking`` is None."""
    return {} if thinking is None else dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")


def _format(given: Mapping[str, Any] | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise RequestError('output_config: format must be {"type": "json_schema", "schema": …}')
    return ResponseFormat("json_schema", JsonSchema("output", given["schema"]))
