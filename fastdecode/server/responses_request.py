"""Requests of OpenAI's Responses API: the body, and the corresponding chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from fastdecode.api.conversations import one_system_message
from fastdecode.core.errors import RequestError
from fastdecode.server.protocol import ChatRequest, Messages, SampledRequest
from fastdecode.server.text_forms import ResponseFormat

RESPONSES = "/v1/responses"

LOGPROBS = "message.output_text.logprobs"

SAME = (*SampledRequest.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs")
"""Fields of OpenAI or vLLM that a ChatRequest has under the same name."""


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The format of the answer's text. ``schema``: set for type "json_schema". ``strict``: as in a chat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """``verbosity`` is ignored, since most models do not know it."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SampledRequest, kw_only=True):
    """``input``: text, or a list of messages, function calls and their outputs. ``tools``: functions only.

    ``store``, ``background`` and ``previous_response_id`` need a server with --journal. Other servers store
    nothing, and refuse the latter two. No server supports ``conversation``, ``prompt`` and ``truncation``.
    """

    input: str | Messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None

    @property
    def is_stored(self) -> bool:
        """True if the answer can be requested later."""
        return bool(self.store or self.background)


def chat_of(request: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Return ``request`` as a chat request: its instructions, then ``messages``.

    Raise RequestError for unsupported or invalid values.
    """
    _refuse_unsupported(request)
    return ChatRequest(
        messages=_with_instructions(request.instructions, messages),
        max_completion_tokens=request.max_output_tokens,
        response_format=_response_format(request.text.format if request.text else None),
        tools=None if request.tools is None else [_chat_tool(tool) for tool in request.tools],
        tool_choice=_chat_choice(request.tool_choice),
        logprobs=LOGPROBS in (request.include or ()),
        top_logprobs=request.top_logprobs,
        **{name: getattr(request, name) for name in SAME},
    )


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with the instructions in front of their system message, or as a new system message."""
    if instructions is None:
        return messages
    is_system = bool(messages) and messages[0]["role"] == "system"
    texts = [instructions, messages[0]["content"]] if is_system else [instructions]
    return one_system_message(texts) + messages[is_system:]


def _refuse_unsupported(request: ResponsesRequest) -> None:
    # OpenAI's values of ``include``. All but LOGPROBS ask for details of items that no answer here has.
    includes = frozenset({
        LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    })  # fmt: skip
    refused = {
        "conversation": (request.conversation is not None, "is not supported: give previous_response_id, or all input"),
        "prompt": (request.prompt is not None, "is not supported: no prompts are stored; send instructions and input"),
        "background": (bool(request.background) and request.store is False, "needs store: true"),
        "truncation": (
            request.truncation not in (None, "disabled"),
            "must be disabled: an input that does not fit is refused",
        ),
        "top_logprobs": (
            bool(request.top_logprobs) and LOGPROBS not in (request.include or ()),
            f"needs include: [{LOGPROBS}]",
        ),
        "include": (set(request.include or ()) - includes != set(), f"may only name {', '.join(sorted(includes))}"),
    }
    for name, (wrong, message) in refused.items():
        if wrong:
            raise RequestError(f"{name} {message}")


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the input ``given`` as chat messages. Tool calls join the assistant's message before them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    items: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
        "message": _message,
        "reasoning": _reasoning,
        "function_call": _call,
        "function_call_output": _call_output,
    }
    for item in given:
        kind = item.get("type", "message")
        read = items.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise RequestError(f"input: items may be {', '.join(items)}, not {kind!r:.80}")
        message = read(item)
        if message is None:
            continue
        if kind == "function_call" and found and found[-1]["role"] == "assistant":
            found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            found.append(message)
    return found


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise RequestError(f"input: role must be user, assistant, system or developer, got {role!r:.80}")
    return {"role": role, "content": _text(item.get("content"))}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments, call_id = (item.get(key) for key in ("name", "arguments", "call_id"))
    if not all(isinstance(each, str) for each in (name, arguments, call_id)):
        raise RequestError("input: a function_call has a name, arguments (JSON text) and a call_id")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _call_output(item: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str):
        raise RequestError("input: a function_call_output has the call_id of its call, and an output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"))}


def _reasoning(item: Mapping[str, Any]) -> None:
    """Ignore a reasoning ``item`` that a client sends back: templates omit reasoning of earlier turns."""


def _text(content: Any) -> str:
    """Return ``content`` as one text; each of several parts starts a new line."""
    if isinstance(content, str):
        return content
    texts = [_part_text(part) for part in content] if isinstance(content, list) else [None]
    if None in texts:
        raise RequestError('input: content must be text, or a list of {"type": "input_text", "text": …}: no images')
    return "\n".join(map(str, texts))


def _part_text(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    text_parts = ("input_text", "output_text", "text")
    text = part.get("refusal" if kind == "refusal" else "text") if kind in (*text_parts, "refusal") else None
    return text if isinstance(text, str) else None


def _response_format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    if wanted.type == "json_schema" and wanted.schema is None:
        raise RequestError("text: format.schema is missing")
    return ResponseFormat(wanted.type, schema=wanted.schema, strict=wanted.strict)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"tools: only functions are supported, not {tool.get('type')!r:.80}")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return ``choice`` in a chat's form, which has the function's name in "function", not next to "type"."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
