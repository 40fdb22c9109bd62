"""Tool calls in a model's text, and their parts as clients receive them, with ids and valid JSON arguments."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_CALLS = uuid.UUID("6f3b1d3e-8f0a-4b8e-9d0c-2f7a5e1c4b90")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"


@dataclass(frozen=True)
class CallPart:
    """A new part of tool call number ``index``. ``first``: the call's first part. ``complete``: its last part."""

    index: int
    call_id: str
    name: str
    arguments: str
    first: bool
    complete: bool


def call_id(answer: str, number: int, length: int = 0) -> str:
    """Return a unique id for tool call number ``number`` of the answer with id ``answer``: always the same id.

    ``length``: characters of an id of letters and digits, for chat templates that need a fixed length; 0 for no limit.
    """
    name = uuid.uuid5(_CALLS, f"{answer}/{number}")
    if not length:
        return f"call_{name.hex}"
    letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    return "".join(letters[name.int // 62**place % 62] for place in range(length))


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments as JSON, with lone surrogates replaced.

    Raise ValueError if ``arguments`` cannot be a JSON object, for instance because of a NaN.
    """
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments must be an object")
    lone = re.compile("[\ud800-\udfff]")
    try:
        return lone.sub("\ufffd", json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def mended_escapes(text: str) -> str:
    r"""Return the JSON ``text`` with each escape of a lone surrogate, such as \ud800, replaced by \ufffd."""
    if "\\u" not in text:
        return text
    escapes = re.compile(f"{_HIGH}{_LOW}|(?P<lone>{_HIGH}|{_LOW})|" + r"\\[^u]|\\u")
    return escapes.sub(lambda found: "\\ufffd" if found["lone"] else found[0], text)


def num_mended(text: str) -> int:
    """Return the length of the growing JSON ``text``, without an escape at its end that may be incomplete."""
    begun_escape = re.compile(f"(?:{_HIGH})?" + r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
    found = begun_escape.search(text, max(0, len(text) - 12))
    return found.start() if found else len(text)


def is_json(text: str) -> bool:
    """Return whether ``text`` is complete JSON; the arguments of a truncated call are not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"[\s,;]*")


def calls_in(text: str) -> list[dict[str, Any]]:
    """Return the tool calls in ``text``, each ``{"name", "arguments"}``. Raise ValueError if it has anything else.

    JSON: consecutive objects, or lists of them; "parameters" is accepted for "arguments". Python: calls with keyword
    arguments, in a list or one per line.
    """
    text = text.strip()
    python = re.compile(r"\[?\s*[A-Za-z_]")
    try:
        found = list(_python_calls(text)) if python.match(text) else list(_json_calls(text))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError("there are no calls in this text")
    return found


def _json_calls(text: str) -> Iterator[dict[str, Any]]:
    at = 0
    while at < len(text):
        value, at = _DECODER.raw_decode(text, at)
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict):
                raise ValueError("a call must be an object")
            yield call
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at


def _python_calls(text: str) -> Iterator[dict[str, Any]]:
    body = ast.parse(text).body
    for each in body:
        value = each.value if isinstance(each, ast.Expr) else None
        for call in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("a call must be a name with keyword arguments")
            named = {each.arg: _value(each.value) for each in call.keywords if each.arg is not None}
            if len(named) != len(call.keywords):
                raise ValueError("a keyword is given twice, or has no name")
            yield {"name": ast.unparse(call.func), "arguments": named}


def _value(node: ast.expr) -> Any:
    """Return the value of a Python literal; true, false and null are accepted too. Raise ValueError for other nodes."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(each) if each is not None else None for each in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys of an object must be text")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex | set) or value is ...:
        raise ValueError("an argument must be a JSON value")
    return value
