"""``--help``: commands in groups, and a few flags of each command, in one line each."""

from __future__ import annotations

import argparse
import re

import pytest

from fastdecode.cli.essentials import ESSENTIAL, GROUPS, TEXTS
from fastdecode.cli.main import COMMANDS, build_parser, main

LEAVES = [name for name in COMMANDS if name != "cache"]

MOST_SHOWN = 15
"""Most flags that a command's ``--help`` lists, including ``--help`` and ``--help-all``."""


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_commands_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    text = help_of(["--help"], capsys)
    for title, names in GROUPS.items():
        group = text.split(f"\n{title}:\n")[1].split("\n\n")[0].splitlines()
        assert [re.split(r"  +", line.strip())[0] for line in group] == list(names)
        assert all(re.match(r"    \S.*?  +\S", line) for line in group), "each says what it does"


@pytest.mark.parametrize("name", LEAVES)
def test_help_shows_a_few_flags_in_a_line_each(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, whole = (help_of([*name.split(), flag], capsys) for flag in ("--help", "--help-all"))
    lines = [line for line in short.splitlines() if re.match(r"  -", line)]
    assert 1 <= len(lines) + 2 <= MOST_SHOWN + 1, "with --help and --help-all"
    assert all(len(line) <= 100 for line in short.splitlines())
    assert "--help-all shows" in short.splitlines()[-1]
    for line in lines:
        flag = re.findall(r"--[\w-]+", line)[0]
        assert re.search(rf"^  .*{flag}\b", whole, re.MULTILINE)
    assert len(whole) > len(short) or len(lines) < 5


@pytest.mark.parametrize("name", ESSENTIAL)
def test_essential_flags_are_there(name: str) -> None:
    words = name.split()
    parser = build_parser(words)
    for word in words:
        actions = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = actions.choices[word]
    dests = {each.dest for each in parser._actions if each.help != argparse.SUPPRESS}
    assert set(ESSENTIAL[name]) <= dests
    assert len(ESSENTIAL[name]) + 2 <= MOST_SHOWN


def test_defaults_and_units_stay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(["serve", "--help"], capsys)
    assert re.search(r"--port PORT .*\(8000\)", text) and re.search(r"--kv-cache-memory BYTES .*4GiB.*\(40 %", text)
    assert re.search(r"--max-model-len TOKENS .*\(the model's\)", text)
    assert TEXTS["r_workers"] in text
    assert "--gpu-memory-utilization" not in help_of(["serve", "--help-all"], capsys)


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for word, said in (("generat", "is generate meant?"), ("chat", "`fastdecode serve`"), ("xyz", "there are bench,")):
        with pytest.raises(SystemExit) as end:
            main([word])
        error, help_line = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and said in error and "--help" in help_line
