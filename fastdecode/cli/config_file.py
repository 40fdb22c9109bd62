"""``--config FILE``: flags from a YAML file; the command line overrides them."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastdecode.cli.words import END, Actions, flag_of

CONFIG = "--config"


def with_file(words: Sequence[str], actions: Actions) -> tuple[list[str], frozenset[str]]:
    """Return command line ``words`` plus the flags of their ``--config`` file, and the dests that only the file sets.

    Raises:
        ValueError: the file is missing, is no YAML mapping, or has an unknown flag.
    """
    last = words.index(END) if END in words else len(words)
    line, path = _without_config(words[:last])
    if path is None or CONFIG not in actions:
        return list(words), frozenset()
    given = {actions[flag].dest for word in line if (flag := flag_of(word, actions))}
    added = dict(_flags(path, actions))
    kept = {dest: found for dest, found in added.items() if dest not in given}
    more = [word for found in kept.values() for word in found]
    return [*line, *more, *words[last:]], frozenset(kept)


def _without_config(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return ``words`` without ``--config FILE``, and the path FILE; None as the path if there is no --config."""
    line, path, rest = [], None, list(words)
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0] != CONFIG:
            line.append(word)
            continue
        if path is not None:
            raise ValueError(f"argument {CONFIG}: give one file")
        value = word.partition("=")[2] if "=" in word else (rest.pop(0) if rest else "")
        if not value:
            raise ValueError(f"argument {CONFIG}: expected one argument, a YAML file")
        path = value
    return line, path


def _flags(path: str, actions: Actions) -> Iterator[tuple[str, list[str]]]:
    """Yield argparse's dest and the command-line words of each setting in the file at ``path``."""
    for name, value in _read(path).items():
        flag = f"--{str(name).lstrip('-').replace('_', '-')}"
        if flag not in actions or flag == CONFIG:
            near = difflib.get_close_matches(flag, [*actions], 1, 0.75)
            meant = f" (is {near[0].lstrip('-')} meant?)" if near else ""
            raise ValueError(f"{path}: {name!r} is no flag of this command{meant}")
        yield actions[flag].dest, _words(path, flag, value, actions[flag], actions)


def _words(path: str, flag: str, value: Any, action: argparse.Action, actions: Actions) -> list[str]:
    """Return the command-line words that set ``flag`` to the file's ``value``; [] for null or an empty list."""
    if value is None or value == []:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {flag[2:]} must be true or false, not {value!r:.80}")
        off = f"--no-{flag[2:]}"
        return [flag] if value else [off] if off in actions else []
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *(each if isinstance(each, str) else json.dumps(each) for each in value)]
    return [f"{flag}={value if isinstance(value, str) else json.dumps(value)}"]


def _read(path: str) -> dict[str, Any]:
    """Return the mapping that the YAML file at ``path`` contains."""
    if find_spec("yaml") is None:
        raise ValueError(f"argument {CONFIG}: needs PyYAML, which is not installed: pip install pyyaml")
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"argument {CONFIG}: cannot read {path!r}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"argument {CONFIG}: {path!r} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"argument {CONFIG}: {path!r} must hold lines such as `max-model-len: 4096`")
    return found
