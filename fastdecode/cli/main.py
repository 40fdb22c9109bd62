"""The ``fastdecode`` program: parses, dispatches, and turns each failure into one line and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastdecode import __version__, not_installed
from fastdecode.cli.essentials import ESSENTIAL, GROUPS
from fastdecode.cli.parser import Parser
from fastdecode.core.errors import ConfigError, FastDecodeError

COMMANDS = (
    "generate",
    "serve",
    "run-batch",
    "bench throughput",
    "bench latency",
    "bench serve",
    "bench attention",
    "bench perplexity",
    "bench prefill",
    "calibrate",
    "plan",
    "validate",
    "simulate",
    "r-worker",
    "prefill-worker",
    "launch",
    "cache",
    "get-model",
    "doctor",
    "collect-env",
)
"""All commands. Each has a module of that name, with underscores, whose ``add_command`` registers the command."""

WITHOUT_S_PART = ("plan", "r-worker", "cache", "doctor", "collect-env")
"""Commands of the distribution ``fastdecode-r-worker``, which has neither torch nor transformers."""


EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. The command ends as on Ctrl-C, and prints its partial results."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return 0, 1 on failure, 2 on wrong usage, 130 on Ctrl-C, 143 on SIGTERM."""
    _make_outputs_take_all()
    words = sys.argv[1:] if argv is None else argv
    args = build_parser(words).parse_args(words)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with _signals_raise():
            return args.run(args) or 0
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        print(f"fastdecode: {'terminated' if terminated else 'interrupted'}", file=sys.stderr)
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return _report(error, args)


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser for the command that ``words`` begin with, or for all commands.

    This imports only the modules of the commands that the parser knows.
    """
    parser = Parser(prog="fastdecode", description="Decode large language models with the attention on CPU R-workers.")
    parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    bench = None
    here = COMMANDS if find_spec("fastdecode.sworker") else WITHOUT_S_PART
    if words and words[0] in {name.split()[0] for name in COMMANDS} - {name.split()[0] for name in here}:
        parser.error(f"{words[0]} is not in fastdecode-r-worker: in another environment, pip install fastdecode")
    _check_command(parser, words, here)
    # Commands whose modules are in perfmodel.lab, which no serving process imports
    lab = ("bench", "calibrate", "plan", "validate", "simulate")
    for name in [name for name in here if list(words[: name.count(" ") + 1]) == name.split()] or here:
        package = "fastdecode.perfmodel.lab.cli" if name.split()[0] in lab else "fastdecode.cli"
        module = importlib.import_module(f"{package}.{name.replace(' ', '_').replace('-', '_')}")
        if name.startswith("bench "):
            bench = bench or commands.add_parser("bench", help="measure").add_subparsers(
                title="benchmarks", metavar="WHAT", required=True
            )
            module.add_command(bench)
            _show_essential(name, bench.choices[name.split()[-1]])
        else:
            module.add_command(commands)
            _show_essential(name, commands.choices[name])
    texts = {each.dest: each.help or "" for each in commands._choices_actions}
    texts |= {f"bench {each.dest}": each.help or "" for each in (bench._choices_actions if bench else ())}
    groups = GROUPS if here is COMMANDS else {"commands": here}
    found = {title: {name: texts[name] for name in names if name in texts} for title, names in groups.items()}
    parser.commands = {title: names for title, names in found.items() if names}
    return parser


def _make_outputs_take_all() -> None:
    """Make stdout and stderr write "?" for characters that they cannot encode, and accept writes if they are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  (to the end)
        elif getattr(stream, "errors", None) in ("strict", "surrogateescape"):
            with contextlib.suppress(OSError):  # fails if the stream was a file at startup and is a pipe now
                stream.reconfigure(errors="replace")


def _show_essential(name: str, parser: Parser) -> None:
    """Make ``--help`` of command ``name`` show only its essential flags, or all flags if they are few."""
    if parser._subparsers is None:
        parser.show(ESSENTIAL.get(name) or parser.visible())
        return
    for group in parser._subparsers._group_actions:
        for action, nested in dict(group.choices or {}).items():
            if not nested.essential:
                _show_essential(f"{name} {action}", nested)


def _check_command(parser: Parser, words: Sequence[str], here: Sequence[str]) -> None:
    """Exit with a one-line message, which suggests a similar command, if ``words`` begin with an unknown command."""
    known = {name.split()[0] for name in here}
    if not words or words[0].startswith("-") or words[0] in known:
        return
    near = difflib.get_close_matches(words[0], known, 1)
    # vLLM's commands that do not exist here, with the command to use instead
    instead = {
        "chat": "`fastdecode serve`, and a client of OpenAI's API; `fastdecode generate --chat` answers one message",
        "complete": "`fastdecode generate` goes on with a text",
    }
    meant = instead.get(words[0]) or (f"is {near[0]} meant?" if near else f"there are {', '.join(sorted(known))}")
    parser.error(f"there is no command {words[0]!r:.80}: {meant}")


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Within the context, raise KeyboardInterrupt on Ctrl-C, unless Ctrl-C was ignored, and Terminated on SIGTERM.

    SIGTERM calls the present handler of SIGINT: the engine sets its own handler while nothing may interrupt the engine.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGTERM:
            raise Terminated
        if before[signal.SIGINT] != signal.SIG_IGN:
            raise KeyboardInterrupt

    def as_interrupt(number: int, frame: Any) -> None:
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else stop)(number, frame)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _less_memory(args: argparse.Namespace) -> str:
    """Return advice for an out-of-memory error: which flags of the command in ``args`` reduce its memory."""
    # Flags that determine how much memory a command takes
    memory_flags = (
        "kv_cache_memory", "prefill_scratch", "max_num_seqs", "num_prompts", "random_input_len", "num_r_workers",
    )  # fmt: skip
    own = [f"--{name.replace('_', '-')}" for name in memory_flags if hasattr(args, name)]
    if not own:
        return "ask for less, or run it where more memory is free"
    return f"give less {', '.join(own[:-1])}{' or ' if own[1:] else ''}{own[-1]}"


def _report(error: Exception, args: argparse.Namespace) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        message = f"out of memory ({message}): {_less_memory(args)}"
    if isinstance(error, ImportError) and (why := not_installed()):
        message = why
    elif not isinstance(error, FastDecodeError | OSError | MemoryError):
        message = f"unexpected {type(error).__name__}: {message} (run with --debug for the traceback)"
    print(f"fastdecode: error: {message}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
