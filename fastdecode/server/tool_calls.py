"""Tool calls that a request forces (``tool_choice``): the form of their text, and the calls that are read from it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.api.text import overlap
from fastdecode.core.errors import RequestError

_CHOICES = 'none, auto, required or {"type": "function", "function": {"name": …}}'
_DEFINITIONS = ("$defs", "definitions")
_CALLS = uuid.UUID("6f3b1d3e-8f0a-4b8e-9d0c-2f7a5e1c4b90")
_DECODER = json.JSONDecoder()
_BARE = re.compile(r"\s*[\[{]")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ForcedCalls:
    """What must be called: function ``name`` once, or, where it is None, any of those offered, one or several.

    ``form``: of the text. Of a named function it is the arguments alone, else a list of {"name", "parameters"}.
    """

    name: str | None
    form: StructuredOutputsParams

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI's: a text of named function's arguments ends with "stop", any other calls with "tool_calls"."""
        return "tool_calls" if reason == "stop" and self.name is None else reason


@dataclass(frozen=True)
class CallPart:
    """What is new of call number ``index``. ``first``: nothing of it was handed out before. ``complete``: nothing
    more will come."""

    index: int
    call_id: str
    name: str
    arguments: str
    first: bool
    complete: bool


def forced_calls(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool = True
) -> ForcedCalls | None:
    """What ``tool_choice`` forces; None where the text is free. ``parallel``: several calls may come at once.

    RequestError for a choice that is not understood, and for tools among which it cannot be made.
    """
    if choice in (None, "none", "auto"):
        return None
    if choice == "required":
        return ForcedCalls(None, _any_of(_functions(tools), parallel))
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"tool_choice must be {_CHOICES}, got {choice!r:.80}")
    functions = _functions(tools)
    if name not in functions:
        raise RequestError(f"tool_choice: no tool is named {name!r:.80}; there are {', '.join(functions):.200}")
    return ForcedCalls(name, _compact(functions[name]))


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each function's arguments, by name."""
    if not tools:
        raise RequestError("tool_choice: a call cannot be forced without tools")
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") if tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        schema = (function or {}).get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(name, str) or not name or not isinstance(schema, Mapping) or name in found:
            raise RequestError(
                'tools must be a list of {"type": "function", "function": {"name": …, "parameters": JSON schema}}, '
                "each with a name of its own"
            )
        found[name] = schema
    return found


def _compact(schema: Mapping[str, Any]) -> StructuredOutputsParams:
    """Without blanks between tokens, which some models would write for ever, and without keys that are not listed."""
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


def _any_of(functions: Mapping[str, Mapping[str, Any]], parallel: bool) -> StructuredOutputsParams:
    """A list of calls. Definitions move to the top, where the references of each function's schema look for them."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for name, schema in functions.items():
        for kind in _DEFINITIONS:
            for key, each in _mapping(schema.get(kind, {}), kind).items():
                if definitions.setdefault(kind, {}).setdefault(key, each) != each:
                    raise RequestError(f"tools: {kind} has several meanings of {key!r:.80}; name them apart")
        inner = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": inner},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {} if parallel else {"maxItems": 1}
    return _compact({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **definitions})


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"tools: {name} must be an object, got {value!r:.80}")
    return value


class CallReader:
    """Reads one text as it grows: arguments of a named function as they come, other calls each when it is complete.

    ``answer``: see ``call_id``.
    """

    def __init__(self, forced: ForcedCalls, answer: str) -> None:
        self._name, self._answer = forced.name, answer
        self._num_read = 0
        self._num_calls = 0

    def read(self, text: str, finished: bool) -> list[CallPart]:
        """What is new in ``text``, which begins as it did the last time; ``finished``: nothing follows."""
        if self._name is None:
            return self._read_list(text, finished)
        part = CallPart(0, call_id(self._answer, 0), self._name, text[self._num_read :], self._num_calls == 0, finished)
        self._num_read, self._num_calls = len(text), 1
        return [part] if part.arguments or part.first or finished else []

    def _read_list(self, text: str, finished: bool) -> list[CallPart]:
        """Complete calls, and of a finished text the one that was cut."""
        found = []
        while call := _next_call(text, self._num_read + 1) or (  # after the bracket, or the comma
            _cut_call(text, self._num_read + 1) if finished else None
        ):
            name, arguments, self._num_read = call
            number = self._num_calls
            found.append(CallPart(number, call_id(self._answer, number), name, arguments, first=True, complete=True))
            self._num_calls += 1
        return found


def _next_call(text: str, start: int) -> tuple[str, str, int] | None:
    """Name, arguments as JSON text and end of the call at ``start``; None where it is not complete."""
    if text.find("}", start) < 0:
        return None
    try:
        name, end = _DECODER.raw_decode(text, start + len('{"name":'))
        first = end + len(',"parameters":')
        _, last = _DECODER.raw_decode(text, first)
    except (ValueError, RecursionError):
        return None
    return (name, text[first:last], last + 1) if text[last : last + 1] == "}" else None


def _cut_call(text: str, start: int) -> tuple[str, str, int] | None:
    """Name, the part of the arguments that is there, and end of the call at ``start``; None where it has no name."""
    if not text.startswith('{"name":', start):
        return None
    try:
        name, end = _DECODER.raw_decode(text, start + len('{"name":'))
    except ValueError:
        return None
    return name, text[end + len(',"parameters":') :], len(text)


def offered_names(tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None) -> frozenset[str]:
    """The functions that a model may call of itself: with ``tool_choice`` "auto", or none where there are tools."""
    functions = [tool.get("function") for tool in tools or ()] if choice in (None, "auto") else []
    names = (function.get("name") for function in functions if isinstance(function, Mapping))
    return frozenset(name for name in names if isinstance(name, str))


class FreeReader:
    """Reads one free text as it grows, and in it calls of ``names`` in the ways that most models write them.

    These are ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen, SmolLM), and a text that is
    nothing but such an object or a list of them, with "parameters" for "arguments" too (Llama 3, Mistral). Whatever
    else there is stays text. ``answer``: see ``call_id``.
    """

    def __init__(self, names: frozenset[str], answer: str) -> None:
        self._names, self._answer = names, answer
        self._num_read = 0
        self._num_calls = 0
        self._blanks = ""

    def read(self, text: str, finished: bool) -> list[str | CallPart]:
        """What is new in ``text``, which begins as it did the last time, in order: texts to show, and calls that are
        complete. What may yet be a call waits, unless the text is ``finished``; blanks between calls are dropped."""
        bare = _BARE.match(text)
        if bare and self._num_read < bare.end():
            if not finished:
                return []
            if calls := self._calls(text):
                self._num_read = len(text)
                return [*calls]
        found: list[str | CallPart] = []
        while (start := text.find(_OPEN, self._num_read)) >= 0:
            found += self._shown(text[self._num_read : start])
            self._num_read = start
            end = text.find(_CLOSE, start)
            if end < 0 and not finished:
                return found
            last = len(text) if end < 0 else end + len(_CLOSE)
            found += self._calls(text[start + len(_OPEN) : last if end < 0 else end]) or self._shown(text[start:last])
            self._num_read = last
        end = len(text) - (0 if finished else overlap(text[self._num_read :], _OPEN))
        found += self._shown(text[self._num_read : end])
        self._num_read = end
        return found

    def _shown(self, text: str) -> list[str]:
        text, self._blanks = self._blanks + text, ""
        if self._num_calls and text.isspace():
            self._blanks, text = text, ""
        return [text] if text else []

    def _calls(self, text: str) -> list[CallPart]:
        """The calls that ``text`` is, an object or a list; none where it is anything else."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return []
        read = [_name_and_arguments(each) for each in (found if isinstance(found, list) else [found])]
        if not all(name in self._names for name, _ in read):
            return []
        first, self._num_calls, self._blanks = self._num_calls, self._num_calls + len(read), ""
        return [
            CallPart(i, call_id(self._answer, i), str(name), json.dumps(arguments, ensure_ascii=False), True, True)
            for i, (name, arguments) in enumerate(read, first)
        ]


def _name_and_arguments(call: Any) -> tuple[Any, Any]:
    """None for the name where it is no call."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None, None
    arguments = call.get("arguments", call.get("parameters"))
    return (call["name"], arguments) if isinstance(arguments, dict) else (None, None)


def call_id(answer: str, number: int) -> str:
    """Of call ``number`` in ``answer``, a name that no other answer has: the same whenever the answer is read."""
    return f"call_{uuid.uuid5(_CALLS, f'{answer}/{number}').hex}"


def is_json(text: str) -> bool:
    """Say whether ``text`` is whole: arguments of a call that was cut are not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
