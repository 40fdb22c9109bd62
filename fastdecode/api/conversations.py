"""Adapts chat messages from OpenAI clients to chat templates: renames unknown roles, and refuses to drop text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastdecode.core.errors import RequestError

Message = dict[str, Any]

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message may carry the assistant's reasoning."""


def without_empty_fields(message: Mapping[str, Any]) -> Message:
    """Return ``message`` without empty fields.

    Clients send empty fields back as they received them, and some templates only test whether a field is present. A
    ``refusal`` becomes the ``content``; a ``function_call`` becomes one of the ``tool_calls``.
    """
    found = {name: value for name, value in message.items() if name in ("role", "content") or value not in (None, [])}
    refusal, call = found.pop("refusal", None), found.pop("function_call", None)
    if isinstance(refusal, str) and not found.get("content"):
        found["content"] = refusal
    if isinstance(call, Mapping) and "tool_calls" not in found:
        found["tool_calls"] = [{"id": "call_0", "type": "function", "function": dict(call)}]
    if found.get("role") == "function":
        found["role"] = "tool"
    return found


def with_known_roles(messages: Sequence[Message], template: str) -> list[Message]:
    """Return ``messages`` with the role "developer" renamed to "system" if ``template`` does not know "developer".

    The system and developer messages at the beginning become one message, since some templates accept only one.
    """
    if "developer" in template or all(each["role"] != "developer" for each in messages):
        return list(messages)
    num_leading = next(
        (number for number, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages)
    )
    leading = one_system_message([each["content"] for each in messages[:num_leading]]) if num_leading else []
    rest = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages[num_leading:]]
    return leading + rest


def with_known_thoughts(messages: Sequence[Message], template: str) -> list[Message]:
    """Return ``messages`` with the assistant's reasoning under the key that ``template`` reads.

    Clients send the reasoning under any of the keys ``THOUGHTS``.
    """
    names = (name for name in THOUGHTS if re.search(rf"""[.'"]{name}\b""", template))
    known = next(names, None)
    if known is None:
        return list(messages)
    return [_renamed_thoughts(each, known) if each["role"] == "assistant" else each for each in messages]


def _renamed_thoughts(message: Message, known: str) -> Message:
    text = next((message[name] for name in THOUGHTS if isinstance(message.get(name), str) and message[name]), None)
    if text is None:
        return message
    return {**{name: value for name, value in message.items() if name not in THOUGHTS}, known: text}


def one_system_message(texts: Sequence[str]) -> list[Message]:
    """Return one system message with a paragraph per text; an empty list if there are no texts."""
    said = [text for text in texts if text]
    return [{"role": "system", "content": "\n\n".join(said)}] if texts else []


def check_nothing_is_left_out(messages: Sequence[Message], text: str, render: Callable[[list[Message]], str]) -> None:
    """Raise RequestError if the chat template dropped the text of a message that is not the assistant's.

    ``text``: the rendered prompt of ``messages``. A template may rewrite a message's text. If the text is not found,
    ``render`` is called with a short mark in the text's place, and the mark must appear in the result.
    """
    position = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        said = content.strip() if isinstance(content, str) and message["role"] != "assistant" else ""
        found = text.find(said, position)
        position = max(position, found)
        if found < 0 and said not in text and _leaves_out(messages, index, render):
            raise RequestError(
                f"messages: the chat template leaves out messages of role {message['role']!r:.80}: give their text "
                "another role, such as user"
            )


def _leaves_out(messages: Sequence[Message], index: int, render: Callable[[list[Message]], str]) -> bool:
    mark = f"mark{index}mark"
    try:
        marked = [*messages[:index], {**messages[index], "content": mark}, *messages[index + 1 :]]
        return mark not in render(marked).lower()
    except Exception:  # a template may raise anything for a text that it does not expect
        return False
