"""Tool calls forced by ``tool_choice``: constrains the answer's text to calls, and parses the calls in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.core.errors import RequestError
from fastdecode.server.call_parts import CallPart, call_id, mended_escapes, num_mended
from fastdecode.server.schema_refs import localized

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ForcedCalls:
    """The calls that a request forces: one of function ``name``; if ``name`` is None, calls of any offered functions.

    ``form``: constrains the text to a named function's arguments, or else to a list of {"name", "parameters"}.
    """

    name: str | None
    form: StructuredOutputsParams

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason: "tool_calls" in place of "stop", unless a named function was called."""
        return "tool_calls" if reason == "stop" and self.name is None else reason


def forced_calls(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool = True
) -> ForcedCalls | None:
    """Return the calls that ``choice`` (tool_choice) forces; None if none. ``parallel``: several calls are allowed.

    Raise RequestError for an unknown choice, or if ``tools`` lack the chosen function.
    """
    if choice in (None, "none", "auto"):
        return None
    if choice == "required":
        return ForcedCalls(None, _any_of(_functions(tools), parallel))
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    choices = 'none, auto, required or {"type": "function", "function": {"name": …}}'
    if not isinstance(name, str):
        raise RequestError(f"tool_choice must be {choices}, got {choice!r:.80}")
    functions = _functions(tools)
    if name not in functions:
        raise RequestError(f"tool_choice: no tool is named {name!r:.80}; there are {', '.join(functions):.200}")
    return ForcedCalls(name, _compact(localized(functions[name])))


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each function's arguments, by the function's name."""
    if not tools:
        raise RequestError("tool_choice: a call cannot be forced without tools")
    found: dict[str, Mapping[str, Any]] = {}
    definitions = ("$defs", "definitions")
    for tool in tools:
        function = tool.get("function") if tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        schema = (function or {}).get("parameters") or {"type": "object", "properties": {}}
        if isinstance(schema, Mapping):
            for kind in definitions:
                _check_mapping(schema.get(kind, {}), kind)
        if not isinstance(name, str) or not name or not isinstance(schema, Mapping) or name in found:
            raise RequestError(
                'tools must be a list of {"type": "function", "function": {"name": …, "parameters": JSON schema}}, '
                "each with a name of its own"
            )
        found[name] = schema
    return found


def _check_mapping(value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise RequestError(f"tools: {name} must be an object, got {value!r:.80}")


def _compact(schema: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return the constraint of ``schema``; forbid unlisted keys and white space, which some models repeat forever."""
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


def _any_of(functions: Mapping[str, Mapping[str, Any]], parallel: bool) -> StructuredOutputsParams:
    """Return the constraint of a list of calls. Each call refers to its function's schema in ``$defs``."""
    schemas = enumerate(functions.values())
    definitions = {f"{number}": localized(schema, f"#/$defs/{number}") for number, schema in schemas}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, name in enumerate(functions)
    ]
    most = {} if parallel else {"maxItems": 1}
    return _compact({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions})


class CallReader:
    """Parses the forced calls in a growing text: arguments of a named function as they come, other calls once complete.

    At the end, the last call of a truncated list is returned incomplete. ``answer``: the answer's id, for ids of calls.
    """

    thought_spans: Sequence[tuple[int, int]] = ()

    def __init__(self, forced: ForcedCalls, answer: str) -> None:
        self._name, self._answer = forced.name, answer
        self._num_read = 0
        self._num_calls = 0

    def read(self, text: str, finished: bool) -> list[CallPart]:
        """Return the new call parts in ``text``, all of the answer until now. ``finished``: the answer is complete."""
        if self._name is None:
            return self._read_list(text, finished)
        end = len(text) if finished else num_mended(text)
        new = mended_escapes(text[self._num_read : end])
        part = CallPart(0, call_id(self._answer, 0), self._name, new, self._num_calls == 0, finished)
        self._num_read, self._num_calls = end, 1
        return [part] if part.arguments or part.first or finished else []

    def _read_list(self, text: str, finished: bool) -> list[CallPart]:
        """Return the new complete calls in ``text``; if ``finished``, also a truncated last call."""
        found = []
        while call := _next_call(text, self._num_read + 1) or (  # skip the bracket or comma before the call
            _cut_call(text, self._num_read + 1) if finished else None
        ):
            name, arguments, self._num_read = call
            number, self._num_calls = self._num_calls, self._num_calls + 1
            told = mended_escapes(arguments)
            found.append(CallPart(number, call_id(self._answer, number), name, told, first=True, complete=True))
        return found


def _next_call(text: str, start: int) -> tuple[str, str, int] | None:
    """Return name, JSON arguments and end offset of the call at offset ``start``; None if the call is incomplete."""
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
    """Return name, partial arguments and end offset of the truncated call at ``start``; None if the name is cut."""
    if not text.startswith('{"name":', start):
        return None
    try:
        name, end = _DECODER.raw_decode(text, start + len('{"name":'))
    except (ValueError, RecursionError):
        return None
    return name, text[end + len(',"parameters":') :], len(text)
