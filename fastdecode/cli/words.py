"""Translates vLLM's spellings on a command line for argparse: underscores, dots for JSON, and ``-O3``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode.api.vllm.values import read_count

Actions = Mapping[str, argparse.Action]
"""A parser's actions, by each spelling of their flags."""

END = "--"


def plain_words(words: Sequence[str], actions: Actions) -> list[str]:
    """Return command line ``words`` in the spellings that argparse knows. Words after ``--`` stay as they are.

    Raises:
        ValueError: a dotted flag has no value, or conflicts with another word of the line.
    """
    last = words.index(END) if END in words else len(words)
    spelt = [part for word in words[:last] for part in _spell(word, actions)]
    return [*_pairs_alone(_join_dotted(spelt, actions), actions), *words[last:]]


def dashed(word: str) -> str:
    """Return ``word`` with dashes for underscores in the flag. Keys after a dot, and values after "=", stay."""
    if not word.startswith("--"):
        return word
    match = re.match(r"[^.=]*", word)
    flag = match.group() if match else word
    return flag.replace("_", "-") + word[len(flag) :]


def flag_of(word: str, actions: Actions) -> str | None:
    """Return the flag at the start of ``word``, without "=VALUE"; None if ``actions`` lacks that flag."""
    flag = word.partition("=")[0]
    return flag if word.startswith("-") and flag in actions else None


def _spell(word: str, actions: Actions) -> list[str]:
    """Return ``word`` as argparse needs it: known flags with dashes, and ``-O3`` as a long flag and its value."""
    if match := re.fullmatch(r"-O(=?)(.*)", word, re.DOTALL):
        if "--optimization-level" in actions:
            return ["--optimization-level", *([match.group(2)] if match.group(2) else [])]
        return [word]
    plain = dashed(word)
    flag = re.split(r"[.=]", plain, maxsplit=1)[0]
    return [word if re.split(r"[.=]", word, maxsplit=1)[0] in actions or flag not in actions else plain]


def _join_dotted(words: Sequence[str], actions: Actions) -> list[str]:
    """Return ``words`` with ``--flag.key value`` as ``--flag {"key": value}``, merged into a JSON of the same flag."""
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        head, _, keys = flag.partition(".")
        if not (keys and word.startswith("-") and head in actions):
            kept.append(word)
            continue
        if not equals:
            if not rest:
                raise ValueError(f"argument {flag}: expected one argument")
            value = rest.pop(0)
        _merge(objects.setdefault(actions[head].dest, {}), _nested(keys, value))
    for dest, found in objects.items():
        kept = _with_object(kept, dest, found, actions)
    return kept


def _nested(keys: str, value: str) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b". A last key that ends in "+" takes a comma-separated list."""
    *outer, last = keys.removesuffix("+").split(".")
    found: Any = {last: value.split(",") if keys.endswith("+") else _read(value)}
    for key in reversed(outer):
        found = {key: found}
    return dict(found)


def _read(text: str) -> Any:
    """Return the value of ``text`` as JSON, or else as a number such as 4k, or else ``text`` itself."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return read_count(text)
    except ValueError:
        return text


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Merge ``more`` into the dict ``into``: objects key by key, lists by appending; other values replace."""
    for key, value in more.items():
        before = into.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            before.extend(value)
        else:
            into[key] = value


def _with_object(words: list[str], dest: str, found: dict[str, Any], actions: Actions) -> list[str]:
    """Return ``words`` with a single JSON flag for ``dest``, in which the dotted flags ``found`` override keys."""
    flag = next(each for each, action in actions.items() if action.dest == dest)
    kept: list[str] = []
    whole: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if flag_of(word, actions) is None or actions[name].dest != dest:
            kept.append(word)
            continue
        text = value if equals or not rest else rest.pop(0)
        try:
            _merge(whole, json.loads(text))
        except (ValueError, AttributeError):
            raise ValueError(f"argument {flag}: must be a JSON object beside {flag}.KEY, not {text!r:.80}") from None
    _merge(whole, found)
    return [*kept, f"{flag}={json.dumps(whole)}"]


def _pairs_alone(words: Sequence[str], actions: Actions) -> list[str]:
    """Return ``words`` changed so that a flag that takes NAME=VALUE pairs does not take the positional after them."""
    kept: list[str] = []
    flag: str | None = None
    taken = 0
    for word in words:
        if found := flag_of(word, actions):
            flag, taken = (found if _takes_pairs(actions[found]) and "=" not in word else None), 0
            kept += [] if flag else [word]
        elif flag and (taken == 0 or "=" in word or word.lstrip().startswith(("{", "["))):
            kept.append(f"{flag}={word}")
            taken += 1
        else:
            flag = None
            kept.append(word)
    return kept


def _takes_pairs(action: argparse.Action) -> bool:
    return "=" in str(action.metavar) and isinstance(action, argparse._ExtendAction)
