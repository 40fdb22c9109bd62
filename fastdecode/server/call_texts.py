"""Parses tool calls that a response template finds but does not parse: JSON values, or Python calls (LFM2, Llama 4)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

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
        raise ValueError("no calls")
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
                raise ValueError("not a call with keywords")
            named = {each.arg: _value(each.value) for each in call.keywords if each.arg is not None}
            if len(named) != len(call.keywords):
                raise ValueError("a keyword stands twice, or has no name")
            yield {"name": ast.unparse(call.func), "arguments": named}


def _value(node: ast.expr) -> Any:
    """Return the value of a Python literal; true, false and null count too. Raise ValueError for other nodes."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(each) if each is not None else None for each in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys must be text")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex | set) or value is ...:
        raise ValueError("not a value of JSON")
    return value
