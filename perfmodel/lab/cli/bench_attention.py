"""``fastdecode bench attention``: the R-worker's kernel relative to this machine's reading and arithmetic peaks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fastdecode.api.engine_fields import KV_CACHE_DTYPES
from fastdecode.api.settings import parse_bytes
from fastdecode.cli.flags import add_common_flags
from fastdecode.cli.output import check_output_files
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import usable_cores
from fastdecode.engine.compose.backends import tuning

if TYPE_CHECKING:
    from fastdecode.perfmodel.lab.measure.attention_bench import AttentionBench
    from fastdecode.perfmodel.lab.measure.attention_shape import AttentionShape

DTYPES = tuple(dtype for dtype in KV_CACHE_DTYPES if dtype != "auto")
LEAST_REPEATS = 9


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "attention",
        help="the R-worker's attention kernel beside this machine's read peak and roofline",
        description="Median time of one layer's attention over a cache larger than the processor's, in turns with the "
        "machine's read peak and multiply-add peak on the same threads.",
    )
    group = parser.add_argument_group("shapes: a comma list sweeps, several lists give every combination")
    swept = (
        ("--num-heads", "32", "query heads (32)"),
        ("--num-kv-heads", "32", "(32)"),
        ("--head-dim", "128", "elements of a key and of a value (128)"),
        ("--context-len", "1024", "tokens of each sequence; LOW-HIGH draws them uniformly, such as 1-8192 (1024)"),
        ("--batch-size", "auto", "sequences (auto: as many as fill --cache-bytes without sharing)"),
        ("--kv-cache-dtype", "bfloat16", f"dtypes of the cache: {', '.join(DTYPES)} (bfloat16)"),
        ("--threads", "1", "threads of the R-worker, each pinned to a core (1)"),
        ("--isa", "auto", "instruction set (auto: FASTDECODE_ISA if set, else the best)"),
        ("--q-len", "1", "new tokens of each sequence, which attend causally (1)"),
        ("--shared-prefix-len", "0", "tokens at the start that all sequences share (0)"),
        (
            "--latent-dim",
            "0",
            "first dims of keys that are also the values, as in latent attention; 0: none (0)",
        ),
        ("--index-picks", "0", "tokens that an index picks: measure its scan of keys; 0: measure attention (0)"),
    )
    for flag, default, text in swept:
        group.add_argument(flag, default=default, metavar="LIST", help=text)
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--cache-bytes", default="512MiB", metavar="BYTES",
        help="size of the cache, and of the buffer for the read peak (512MiB)",
    )  # fmt: skip
    group.add_argument(
        "--repeats", type=int, default=15, metavar="N", help=f"number of calls, at least {LEAST_REPEATS} (15)"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o", "--output", default="md", choices=["md", "csv", "json", "jsonl"], help="format of the rows on stdout (md)"
    )
    group.add_argument("--output-json", metavar="FILE", help="file to write every figure to")
    group.add_argument(
        "--plot", metavar="PNG", help="file for a picture: fraction of the roofline by group size and context"
    )
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row per shape; after Ctrl-C, write what was measured."""
    from fastdecode.perfmodel.lab.measure.attention_bench import AttentionBench

    shapes = parse_shapes(args)
    if args.repeats < LEAST_REPEATS:
        raise ConfigError(f"repeats must be at least {LEAST_REPEATS}, not {args.repeats}")
    check_output_files(args.output_json, plots=(args.plot,))
    cache_bytes = parse_bytes("cache_bytes", args.cache_bytes)
    # Fewest bytes that each thread reads; fewer would measure caches instead of memory
    least_cache_bytes = 1 << 20
    if cache_bytes < least_cache_bytes * max(shape.threads for shape in shapes):
        raise ConfigError(f"cache_bytes must be at least 1 MiB for each thread, not {cache_bytes} bytes")
    bench = AttentionBench(cache_bytes, args.repeats, args.seed)
    for shape in shapes:
        bench.check(shape)
    rows: list[dict[str, Any]] = []
    try:
        _measure(bench, shapes, args.output, rows)
    finally:
        _write_files(rows, args)
    return 0


def parse_shapes(args: argparse.Namespace) -> list[AttentionShape]:
    """Return every combination of the values that the flags list. A ConfigError names the bad flag."""
    from fastdecode.perfmodel.lab.measure.attention_shape import ContextLen, sweep

    whole = (
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "threads",
        "q_len",
        "shared_prefix_len",
        "latent_dim",
        "index_picks",
    )
    values: dict[str, list[Any]] = {name: [_whole(name, text) for text in _split(args, name)] for name in whole}
    values["context_len"] = [ContextLen.parse(text) for text in _split(args, "context_len")]
    values["batch_size"] = [
        None if text == "auto" else _whole("batch_size", text) for text in _split(args, "batch_size")
    ]
    values["kv_cache_dtype"] = [_one_of("kv_cache_dtype", text, DTYPES) for text in _split(args, "kv_cache_dtype")]
    values["isa"] = [_isa(text) for text in _split(args, "isa")]
    too_many = max(values["threads"])
    if too_many > len(usable_cores()):
        raise ConfigError(f"threads is {too_many}, and this process may use {len(usable_cores())} core(s)")
    return sweep(values)


def _measure(bench: AttentionBench, shapes: list[AttentionShape], output: str, rows: list[dict[str, Any]]) -> None:
    from fastdecode.perfmodel.lab.measure.attention_bench import RowPrinter

    with tqdm(shapes, unit="shape", leave=False, disable=None if sys.stderr.isatty() else True) as bar:

        def write(line: str) -> None:
            bar.write(line, file=sys.stdout)
            sys.stdout.flush()

        printer = RowPrinter(output, write)
        try:
            for shape in bar:
                rows.append(bench.measure(shape))
                printer.add(rows[-1])
        finally:
            printer.close()


def _write_files(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from fastdecode.perfmodel.lab.measure.attention_bench import to_json
    from fastdecode.perfmodel.lab.measure.plots import plot_roofline

    if args.output_json:
        Path(args.output_json).write_text(to_json(rows) + "\n", encoding="utf-8")
    if args.plot and rows:
        plot_roofline(rows, args.plot)


def _split(args: argparse.Namespace, name: str) -> list[str]:
    return [part.strip() for part in getattr(args, name).split(",")]


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} must be a whole number, or several with commas between, not {text!r}")
    most_digits = 12
    if len(text) > most_digits:
        raise ConfigError(f"{name} must have at most {most_digits} digits, not {len(text)}")
    return int(text)


def _one_of(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {text!r}")
    return text


def _isa(text: str) -> str:
    from fastdecode import _rworker

    return tuning().isa if text == "auto" else _one_of("isa", text, ("auto", *_rworker.supported_isas()))
