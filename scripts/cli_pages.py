"""Write the command line's reference in Markdown from its parsers: python scripts/cli_pages.py FOLDER"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fastdecode.cli.main import COMMANDS, build_parser

WIDTH = "100"
"""Columns of a usage line on any terminal."""


def pages() -> dict[str, str]:
    """Return a page for each command, and one that lists them, by their file names."""
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), WIDTH
    try:
        parsers = {name: parser_of(name) for name in COMMANDS}
        return {"index.md": _index(parsers)} | {file_name(name): _page(parsers[name]) for name in COMMANDS}
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def file_name(command: str) -> str:
    """Return the file name of a command's page: "bench serve" has bench-serve.md."""
    return f"{command.replace(' ', '-')}.md"


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command, such as "bench serve"."""
    words = command.split()
    parser = build_parser(words)
    for word in words:
        parser = _subcommands(parser).choices[word]
    return parser


def _subcommands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    return next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))


def _index(parsers: dict[str, argparse.ArgumentParser]) -> str:
    rows = [f"| [`fastdecode {name}`]({file_name(name)}) | {_summary(name)} |" for name in parsers]
    return "\n".join((
        "# Command line",
        "",
        "One program, `fastdecode`. It exits with 0 on success, 2 on wrong usage, 1 on a failure, 130 on Ctrl-C and",
        "143 on SIGTERM. A failure is one line on stderr; `--debug` adds the traceback. These pages are made of the",
        "program's own flags; `fastdecode COMMAND --help-all` prints the same.",
        "",
        "| command | does |",
        "|---|---|",
        *rows,
        "",
    ))  # fmt: skip


def _summary(command: str) -> str:
    *parents, last = command.split()
    parser = build_parser(command.split())
    for word in parents:
        parser = _subcommands(parser).choices[word]
    return _text(next(each.help or "" for each in _subcommands(parser)._choices_actions if each.dest == last))


def _page(parser: argparse.ArgumentParser, help_text: str = "", level: int = 1) -> str:
    """Return a command's usage and flags, then those of its subcommands. Headings begin at ``level``."""
    first, *rest = parser.format_usage().removeprefix("usage: ").rstrip().splitlines()
    usage = "\n".join((first, *(f"    {line.strip()}" for line in rest)))
    blocks = [f"{'#' * level} {parser.prog}", _text(parser.description or help_text), f"```text\n{usage}\n```"]
    for group in parser._action_groups:
        blocks += _group(parser, group, level + 1)
    for actions in (each for each in parser._actions if isinstance(each, argparse._SubParsersAction)):
        helps = {each.dest: each.help or "" for each in actions._choices_actions}
        blocks += [_page(each, helps[name], level + 1) for name, each in actions.choices.items()]
    return "\n\n".join(block.rstrip() for block in blocks if block) + "\n"


def _group(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, level: int) -> Iterator[str]:
    """Yield a heading and a list of definitions, if the group has flags that are not hidden."""
    shown = [
        each
        for each in group._group_actions
        if each.help != argparse.SUPPRESS and not isinstance(each, argparse._SubParsersAction)
    ]
    if shown:
        title = (group.title or "options").replace("positional arguments", "arguments")
        yield f"{'#' * level} {title[0].upper()}{title[1:]}"
        yield _text(group.description or "")
        yield "\n\n".join(_definition(parser, each) for each in shown)


def _definition(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return a definition: the flag with its values, and its help."""
    formatter = parser._get_formatter()
    name = ", ".join(f"`{each}`" for each in formatter._format_action_invocation(action).split(", --"))
    name = name.replace(", `", ", `--")
    help_text = formatter._expand_help(action) if action.help else ""
    return f"{name}\n:   {_text(help_text) or '(no help)'}"


def _text(text: str) -> str:
    """Return help text in which characters that mean something in Markdown or HTML are escaped."""
    for sign in ("\\", "*", "_", "<", "[", "|"):
        text = text.replace(sign, f"\\{sign}" if sign != "<" else "&lt;")
    return " ".join(text.split())


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
