"""Renders Go templates, as far as examples/helm uses them."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

Tokens = list[str]


def rendered(text: str, values: Any) -> str:
    """Return ``text`` with ``.Values`` filled in.
    Supported are ``if``, ``range``, ``toJson``, ``quote``, ``append``, ``dict``, ``and``, ``not``, and "{{-", which
    removes the space before it.
    """
    parts = re.split(r"({{.*?}})", re.sub(r"\s*{{-", "{{", text), flags=re.DOTALL)
    found, rest = _block(parts, {"Values": values})
    assert not rest, "an end too many"
    return found


def _block(parts: Tokens, dot: Any) -> tuple[str, Tokens]:
    """Return the text up to the block's end, and the remaining parts."""
    found, rest = "", list(parts)
    while rest:
        part = rest.pop(0)
        words = part.removeprefix("{{").removesuffix("}}").strip() if part.startswith("{{") else None
        if words is None:
            found += part
        elif words == "end":
            return found, rest
        elif words.startswith("if "):
            inner, rest = _block(rest, dot)
            found += inner if value(words[3:], dot) else ""
        elif words.startswith("range "):
            each = value(words[6:], dot)
            inner, after = _block(rest, dot) if not each else ("", rest)
            for item in each:
                text, after = _block(rest, item)
                inner += text
            found, rest = found + (inner if each else ""), after
        else:
            found += str(value(words, dot))
    return found, []


def value(words: str, dot: Any) -> Any:
    """Return the value of an expression. After "|", the value becomes the last argument of a function."""
    *first, last = words.split("|")
    if first:
        return _call(f"{last} ({'|'.join(first)})", dot)
    return _call(words, dot)


def _call(words: str, dot: Any) -> Any:
    name, *arguments = _arguments(words)
    given = [value(each, dot) for each in arguments]
    match name:
        case "toJson":
            return json.dumps(given[0])
        case "quote":
            return json.dumps(str(given[0]))
        case "append":
            return [*given[0], given[1]]
        case "dict":
            return dict(zip(given[::2], given[1::2], strict=True))
        case "not":
            return not given[0]
        case "and":
            return next((each for each in given if not each), given[-1])
    if name.startswith('"'):
        return shlex.split(name)[0]
    found = dot
    for key in filter(None, name.split(".")):
        found = found[key]
    return found


def _arguments(words: str) -> Tokens:
    """Return the words of an expression; words in brackets stay together, without the brackets."""
    found, depth = [""], 0
    for sign in words.strip():
        if sign in "()":
            depth += 1 if sign == "(" else -1
            if (sign, depth) in (("(", 1), (")", 0)):
                continue
        if sign == " " and not depth:
            found.append("")
        else:
            found[-1] += sign
    return [each for each in found if each]
