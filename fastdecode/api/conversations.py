"""Messages of OpenAI's clients as chat templates read them: roles that templates know, and no words left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastdecode.core.errors import RequestError

Message = dict[str, Any]

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names by which messages have thoughts."""


def without_empty_fields(message: Mapping[str, Any]) -> Message:
    """Return ``message`` without fields that say nothing, which clients send back as they got them: some templates only
    look whether a field is there. A refusal becomes the content; a ``function_call`` becomes one of ``tool_calls``."""
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
    """Return ``messages`` with "system" for "developer" where ``template`` does not know that role.

    Such messages at the beginning become one with the system messages there, since some templates take only one.
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
    """Return ``messages`` with the assistant's thoughts by the name that ``template`` reads: clients send them back by
    any of several names."""
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
    """Return a system message of ``texts``, a paragraph each; none if there are none."""
    said = [text for text in texts if text]
    return [{"role": "system", "content": "\n\n".join(said)}] if texts else []


def check_nothing_is_left_out(messages: Sequence[Message], text: str, render: Callable[[list[Message]], str]) -> None:
    """Raise RequestError if the chat template left out the words of a message, except the assistant's.

    ``text``: what it made of ``messages``. Words that it wrote otherwise are looked for by a mark in their place, which
    ``render`` shows.
    """
    position = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        said = content.strip() if isinstance(content, str) and message["role"] != "assistant" else ""
        found = text.find(said, position)
        position = max(position, found)
        if found < 0 and said not in text and _leaves_out(messages, index, render):
            raise RequestError(
                f"messages: the chat template leaves out those of role {message['role']!r:.80}: give their text "
                "another role, such as user"
            )


def _leaves_out(messages: Sequence[Message], index: int, render: Callable[[list[Message]], str]) -> bool:
    mark = f"mark{index}mark"
    try:
        marked = [*messages[:index], {**messages[index], "content": mark}, *messages[index + 1 :]]
        return mark not in render(marked).lower()
    except Exception:  # whatever the template raises for a text that it does not expect
        return False
