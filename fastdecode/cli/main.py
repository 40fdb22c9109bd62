"""``fastdecode``: parse, dispatch, and turn every failure into one clear line and an exit status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from fastdecode import __version__
from fastdecode.cli import (
    bench_attention,
    bench_perplexity,
    bench_throughput,
    calibrate,
    collect_env,
    doctor,
    generate,
    launch,
    plan,
    r_worker,
    run_batch,
    simulate,
)
from fastdecode.errors import ConfigError, FastDecodeError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("fastdecode: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return _report(error)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="fastdecode", description="Decode large language models with the attention on CPU R-workers."
    )
    parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate.add_command(commands)
    run_batch.add_command(commands)
    bench = commands.add_parser("bench", help="measure").add_subparsers(
        title="benchmarks", metavar="WHAT", required=True
    )
    bench_throughput.add_command(bench)
    bench_attention.add_command(bench)
    bench_perplexity.add_command(bench)
    calibrate.add_command(commands)
    plan.add_command(commands)
    simulate.add_command(commands)
    r_worker.add_command(commands)
    launch.add_command(commands)
    doctor.add_command(commands)
    collect_env.add_command(commands)
    return parser


def _report(error: Exception) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, FastDecodeError | OSError | MemoryError):
        message = f"unexpected {type(error).__name__}: {message} (run with --debug for the traceback)"
    print(f"fastdecode: error: {message}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
