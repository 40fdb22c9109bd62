"""The argument parser of all commands: short help in groups, one-line errors, and vLLM's spellings of flags."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from fastdecode.api.config import EngineConfig
from fastdecode.api.from_vllm import FOREIGN
from fastdecode.cli.config_file import with_file
from fastdecode.cli.essentials import TEXTS
from fastdecode.cli.words import plain_words

SHORT_HELP_WIDTH, NAMES_WIDTH, MOST_CHOICES = 100, 28, 40


def add_switch(group: Any, *flags: str, dest: str, default: Any = None, help: str | None = None) -> None:
    """Add a switch: ``--x`` and ``--no-x``, and ``--disable-x`` for ``--enable-x``.

    ``--help`` shows only the flag that changes the default, or both flags if the default is on.
    """
    longs = [each for each in flags if each.startswith("--")]
    off = [f"--no-{each[2:]}" for each in longs]
    inverses = {"--enable-": "--disable-", "--disable-": "--enable-"}
    inverse = [new + each.removeprefix(old) for each in longs for old, new in inverses.items() if each.startswith(old)]
    if default:
        group.add_argument(*flags, dest=dest, action=argparse.BooleanOptionalAction, default=default, help=help)
        off = []
    else:
        group.add_argument(*flags, dest=dest, action="store_const", const=True, default=default, help=help)
    for flag in (*off, *inverse):
        hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument(flag, dest=dest, action="store_const", const=False, **hidden)


class _HelpAll(argparse.Action):
    """The action of ``--help-all``: prints the help of every flag, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str = argparse.SUPPRESS, **settings: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show every flag of this command")

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print the help of every flag of ``parser``, and exit."""
        sys.stdout.write(parser.format_all_help())
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations, since ``launch`` searches the S-worker's command for whole flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.essential: frozenset[str] = frozenset()
        self.commands: Mapping[str, Mapping[str, str]] = {}

    def show(self, essential: Iterable[str]) -> None:
        """Make ``--help`` show only the flags with the dests ``essential``, one line each. ``--help-all`` shows all."""
        self.essential = frozenset(essential)
        self.add_argument("--help-all", action=_HelpAll)

    def visible(self) -> list[str]:
        """Return the dests of all flags that are not hidden from help."""
        return list(dict.fromkeys(each.dest for each in self._actions if each.help != argparse.SUPPRESS))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse ``args``. The command's own parser refuses unknown flags, since it can suggest a similar flag."""
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:
            return super().parse_known_args(words, namespace)
        try:
            words, from_file = with_file(plain_words(words, self._option_string_actions), self._option_string_actions)
        except ValueError as error:
            self.error(str(error))
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._unrecognized(unknown))
        found.from_file = from_file
        return found, []

    def error(self, message: str) -> NoReturn:
        """Print ``message``, and a line that says how to get help, on stderr; exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help shows how it is used\n")

    def format_help(self) -> str:
        """Return the text of ``--help``: essential flags, or commands in groups, or else all flags."""
        if self.commands:
            return _list_of_commands(self)
        return _short_help(self) if self.essential else self.format_all_help()

    def format_all_help(self) -> str:
        """Return the text of ``--help-all``: every flag with its whole help text."""
        return super().format_help()

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        """Return an error message about the ``unknown`` words, with a similar flag if there is one."""
        text = f"unrecognized arguments: {' '.join(unknown)}"
        flag = next((each.partition("=")[0] for each in unknown if each.startswith("-")), None)
        if flag is None:
            return text
        near = difflib.get_close_matches(flag, [*self._option_string_actions], 1, 0.75)
        name = flag.lstrip("-").replace("-", "_")
        if near:
            return f"{text} (is {near[0]} meant?)"
        elsewhere = name in FOREIGN or name in EngineConfig.__dataclass_fields__
        return f"{text} ({flag} is for commands that load a model, such as fastdecode serve)" if elsewhere else text


def _list_of_commands(parser: Parser) -> str:
    """Return the help of a parser with subcommands: a line per command, under group headings."""
    lines = [f"usage: {parser.prog} COMMAND [flags]", "", str(parser.description)]
    for title, commands in parser.commands.items():
        lines += ["", f"{title}:", *(f"    {name:<18}{text}" for name, text in commands.items())]
    return "\n".join(
        [*lines, "", f"{parser.prog} COMMAND --help shows how a command is used, --version the version.", ""]
    )


def _short_help(parser: Parser) -> str:
    """Return the text of ``--help``: the usage, and a line per essential flag under group headings."""
    width = min(SHORT_HELP_WIDTH, shutil.get_terminal_size((SHORT_HELP_WIDTH, 24)).columns)
    positionals = [each for each in parser._actions if not each.option_strings]
    usage = " ".join([parser.prog, *(_positional(each) for each in positionals), "[flags]"])
    told = textwrap.wrap(parser.description or "", width)
    lines = [f"usage: {usage}", *(["", *told] if told else [])]
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if each.dest in parser.essential or not each.option_strings]
        shown = [each for each in shown if each.help != argparse.SUPPRESS]
        if shown:
            lines += [
                "",
                f"{str(group.title).removeprefix('positional ')}:",
                *(_line(parser, each, width) for each in shown),
            ]
    hidden = {*parser.visible()} - parser.essential - {each.dest for each in positionals} - {"help", argparse.SUPPRESS}
    return "\n".join([*lines, "", f"--help-all shows {len(hidden) or 'no'} more flags and longer texts.", ""])


def _line(parser: Parser, action: argparse.Action, width: int) -> str:
    """Return the help line of ``action``: flag, value, and help cut to ``width`` columns; the default is not cut."""
    formatter = argparse.HelpFormatter(parser.prog)
    longs = [each for each in action.option_strings if each.startswith("--")]
    names = ", ".join([each for each in action.option_strings if each not in longs[1:]]) or _positional(action)
    if action.option_strings and action.nargs != 0:
        names += f" {action.metavar or (action.choices and '…') or action.dest.upper()}"
    told, default = _split(formatter._expand_help(action) if action.help else "")
    if action.choices and len(choices := ", ".join(map(str, action.choices))) <= MOST_CHOICES:
        told = f"{choices}" if not told else f"{told}: {choices}"
    told = TEXTS.get(action.dest, told)
    room = width - 4 - max(NAMES_WIDTH, len(names)) - (len(default) + 1 if default else 0)
    if len(told) > room:
        told = told[: max(room - 1, 0)].rsplit(" ", 1)[0].rstrip(",;:") + "…"
    return f"  {names:<{NAMES_WIDTH}}  {f'{told} {default}'.strip()}".rstrip()


def _split(text: str) -> tuple[str, str]:
    """Split help "TEXT (DEFAULT: note)" into "TEXT" and "(DEFAULT)"; the latter is "" without final parentheses."""
    match = re.fullmatch(r"(.*?)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", " ".join(text.split()))
    if not match:
        return text, ""
    default = re.split(r"[:;,] ", match.group(2))[0]
    return match.group(1), f"({default})"


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "+": f"{name}…", "*": f"[{name}…]"}.get(str(action.nargs), name)
