"""A message that a test expects must occur in the source, so a reworded one is noticed without running its test.

Tests quote messages in ``pytest.raises(…, match=…)``: as a literal, or as a name that a loop or ``parametrize`` sets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("fastdecode", "sworker", "cluster", "perfmodel", "rworker_cpp", "tests/helpers", "tests/doubles")
"""Folders whose texts may be quoted. Links in ``fastdecode`` are not followed."""

VALUE = "\0"
"""Stands for a value that a message names."""

FOREIGN = {
    "Bad file descriptor",
    "choice must be a list of non-empty strings",
    "does not say its cores and memory",
    "grammar must be a grammar",
    "gptq weights with bits",
    "awq weights with version",
    "invalid enum value",
    "is not packed",
    "must be a number above",
    "must hold token ids from",
    "or newer and has",
    "out of luck",
    "out of range",
    "cached tokens beside its states",
    "a policy wrote to",
    "refused the step's plan",
    "refused to export a sequence",
    "refused to park a sequence",
    "regex must be a regular expression",
    "session a was continued by host",
    "this model asks for a mask that is neither causal nor",
    "type must be a string",
}
"""Words of Python, of libraries, of the system and of tests, and words that the product joins from several texts."""


@cache
def messages() -> str:
    """Return all texts of more than one word in the source, one per line, with ``VALUE`` for each value."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = [
        text
        for path in paths
        if path.suffix in (".py", ".cpp", ".hpp")
        for text in texts_of(path.read_text("utf-8"), path.suffix == ".py")
    ]
    return "\n".join(found)


def texts_of(source: str, is_python: bool) -> list[str]:
    """Return the texts of more than one word in ``source``, with ``VALUE`` for each value."""
    if is_python:
        joined = re.sub(r'"\s*\n\s*[rf]*"', "", re.sub(r'"""(?:.|\n)*?"""', "", source))
        joined = joined.replace("{{", "(").replace("}}", ")")
        value = r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
    else:
        joined = re.sub(r'"\s*\+[^"]*?\+\s*"', "{}", re.sub(r'"\s*\n\s*"', "", source))
        joined = re.sub(r'\+\s*"', '"{}', re.sub(r'"\s*\+', '{}"', joined))
        value = r"\{\}"
    texts = re.findall(r"""\"((?:[^"\\\n]|\\.)*)\"|'([^'\n]*"[^'\n]*)'""", joined)
    return [re.sub(value, VALUE, re.sub(r"\\(.)", r"\1", one or two)) for one, two in texts if " " in one + two]


def quoted() -> Iterator[tuple[str, str]]:
    """Yield the place and the pattern of each message that a test expects."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        for function in ast.parse(text).body if "match=" in text else ():
            for expected in matches_in(function):
                for pattern in values_of(expected, function):
                    yield f"{path.name}:{expected.lineno}", pattern


def matches_in(function: ast.stmt) -> Iterator[ast.expr]:
    """Yield the ``match`` of each ``raises`` in ``function``."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "raises":
            yield from (each.value for each in node.keywords if each.arg == "match")


def values_of(expected: ast.expr, function: ast.stmt) -> list[str]:
    """Return the texts that ``expected`` may be; none if the name is set in a way that is not seen here."""
    if isinstance(expected, ast.Constant):
        return [str(expected.value)]
    if isinstance(expected, ast.JoinedStr):
        return ["".join(str(each.value) if isinstance(each, ast.Constant) else ".*" for each in expected.values)]
    if not isinstance(expected, ast.Name):
        return []
    return [
        text
        for names, rows in settings_in(function)
        if expected.id in names
        for row in rows
        if (chosen := chosen_of(row, names.index(expected.id), len(names)))
        for text in values_of(chosen, ast.Pass())
    ]


def settings_in(function: ast.stmt) -> Iterator[tuple[list[str], list[ast.expr]]]:
    """Yield the names that each loop and each ``parametrize`` in ``function`` sets, and the rows of their values."""
    for node in ast.walk(function):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List):
            yield names_in(node.target), node.iter.elts
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize" and len(node.args) > 1:
            rows = node.args[1]
            yield names_in(node.args[0]), rows.elts if isinstance(rows, ast.Tuple | ast.List) else []


def names_in(target: ast.expr) -> list[str]:
    """Return the names in the target of a loop, or in the first argument of ``parametrize``."""
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return [each.id if isinstance(each, ast.Name) else str(getattr(each, "value", "")) for each in parts]


def chosen_of(row: ast.expr, index: int, count: int) -> ast.expr | None:
    """Return the value at ``index`` of a row of ``count`` values; None if the row is no plain one."""
    if isinstance(row, ast.Call) and getattr(row.func, "attr", "") == "param":
        return row.args[index] if index < len(row.args) else None
    if count == 1:
        return row
    return row.elts[index] if isinstance(row, ast.Tuple | ast.List) and index < len(row.elts) else None


def runs_of(pattern: str) -> list[str]:
    """Return the runs of three or more plain words in ``pattern``, a regular expression."""
    plain = re.sub(r"\([^()]*\)|\[[^\]]*\]|[.][*+?]|[|^$*+?{}()]", "\n", re.sub(r"\\(\W)", r"\1 ", pattern))
    return re.findall(r"(?<![\w.'-])[A-Za-z][a-z'-]*(?: [a-z][a-z'-]*){2,}(?![\w.'-])", plain)


def occurs(run: str, source: str) -> bool:
    """Return whether a message in ``source`` may contain the plain words ``run``; one of them may be a value."""
    if run in source:
        return True
    words = run.split()
    for place in range(len(words)):
        before, after = " ".join(words[:place]), " ".join(words[place + 1 :])
        if (not before or f"{before} {VALUE}" in source) and (not after or f"{VALUE} {after}" in source):
            return True
    return False


def test_messages_that_tests_expect_are_in_the_source() -> None:
    expected = [(run, place) for place, pattern in quoted() for run in runs_of(pattern)]
    assert len(expected) > 450
    missing = {run: place for run, place in expected if not occurs(run, messages())}
    assert {run: place for run, place in missing.items() if run not in FOREIGN} == {}, "were these reworded?"
    assert FOREIGN - missing.keys() == set(), "these are found"


@pytest.mark.parametrize(
    ("is_python", "line"),
    [
        (True, 'f"import: {name} has a negative file offset"'),
        (True, 'f"import: {name} has a "\n  f"{sign} file offset"'),
        (False, '"import: " + name + " has a negative "\n  "file offset"'),
        (False, '"import: " + name + sign +\n" file offset"'),
    ],
)
def test_a_reworded_message_is_found(is_python: bool, line: str) -> None:
    (run,) = runs_of("import: .* negative file offset")
    reworded = line.replace("file offset", "offset in its file")
    assert occurs(run, "\n".join(texts_of(line, is_python)))
    assert not occurs(run, "\n".join(texts_of(reworded, is_python)))
