"""Nonsense after any flag of the lab's commands gives one clear line, no traceback, and takes little memory."""

from __future__ import annotations

import argparse
import random
import resource

import pytest

from fastdecode.cli.main import build_parser, main

NO_MODEL = ["--model", "/no/such/folder"]
NAMES = ["--model", "llama-3-8b", "--gpu", "a10", "--cpu", "epyc-7452"]

COMMANDS = {
    "plan": [*NAMES, "--seq-len", "2048"],
    "simulate": [*NAMES, "--num-prompts", "8", "--random-input-len", "16", "--random-output-len", "4"],
    "calibrate": [*NO_MODEL, "--output", "/no/such/folder/profile.json"],
    "validate": [*NO_MODEL, "--profile", "/no/such/profile.json"],
    "bench throughput": [*NO_MODEL, "--num-prompts", "2"],
    "bench serve": ["--port", "1", "--num-prompts", "2"],
}
"""Correct flags of each command.
Commands that need a model, or a server, end with a clear line of their own.
"""

NONSENSE = (
    "nan", "-1", "0", "1e999", "-inf", "1e-320", "abc", "", "🙂", "9" * 30, "1" + "0" * 11, "3.5", "[]", '{"a": 1}',
    "1,,2", "/no/such/file", "0x10", "1e3", "true", "12 GB", "-0", "1:2:3", "9999999GB/s:1cores:1GiB", "\t",
)  # fmt: skip

LARGEST_GROWTH = 1 << 30


def leaves(command: str) -> list[argparse.Action]:
    """Return the flags of a command that take a value, except those that only write files or print help."""
    parser: argparse.ArgumentParser = build_parser(command.split())
    for word in command.split():
        groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        parser = groups[0].choices[word]
    skipped = ("help", "help_all", "debug", "plot", "plot_steps", "plot_timeline", "output_json", "config", "log_level")
    return [each for each in parser._actions if each.option_strings and each.nargs != 0 and each.dest not in skipped]


def drawn(command: str, number: int) -> list[list[str]]:
    """Return command lines in which one or two flags have nonsense for a value."""
    rng = random.Random(command)
    flags = leaves(command)
    lines = []
    for _ in range(number):
        chosen = rng.sample(flags, rng.choice((1, 1, 2)))
        words = [f"{flag.option_strings[-1]}={rng.choice(NONSENSE)}" for flag in chosen]
        lines.append([*command.split(), *COMMANDS[command], *words])
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_nonsense_is_refused_in_one_line(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for words in drawn(command, 40):
        try:
            code = main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        error = [line for line in capfd.readouterr().err.splitlines() if line.strip() and "\r" not in line]
        assert code in (0, 1, 2), words
        told = [line for line in error if "error:" in line]
        assert len(told) == (code != 0) and not any("Traceback" in line for line in error), (words, error)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < LARGEST_GROWTH
