"""Parts of tool calls as clients receive them, with their ids, and with arguments that are JSON in any parser."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CALLS = uuid.UUID("6f3b1d3e-8f0a-4b8e-9d0c-2f7a5e1c4b90")
_LONE = re.compile("[\ud800-\udfff]")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(f"{_HIGH}{_LOW}|(?P<lone>{_HIGH}|{_LOW})|" + r"\\[^u]|\\u")
_BEGUN_ESCAPE = re.compile(f"(?:{_HIGH})?" + r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


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


def call_id(answer: str, number: int, length: int = 0) -> str:
    """Return the id of call ``number`` in ``answer``, which no other answer has: the same whenever it is read.

    ``length``: of an id of letters and digits alone, where the chat template takes no other.
    """
    name = uuid.uuid5(_CALLS, f"{answer}/{number}")
    if not length:
        return f"call_{name.hex}"
    return "".join(_LETTERS[name.int // 62**place % 62] for place in range(length))


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments as JSON, halves of surrogate pairs replaced.

    Raise ValueError if they are no object of JSON, such as with a number that is none.
    """
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments must be an object")
    try:
        return _LONE.sub("\ufffd", json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def mended_escapes(text: str) -> str:
    """Return the JSON ``text`` with escapes of halves of surrogate pairs replaced; it keeps its length."""
    if "\\u" not in text:
        return text
    return _ESCAPES.sub(lambda found: "\\ufffd" if found["lone"] else found[0], text)


def num_mended(text: str) -> int:
    """Return how much of the growing JSON ``text`` can be mended whatever follows."""
    found = _BEGUN_ESCAPE.search(text, max(0, len(text) - 12))
    return found.start() if found else len(text)


def is_json(text: str) -> bool:
    """Return whether ``text`` is whole: arguments of a call that was cut are not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
