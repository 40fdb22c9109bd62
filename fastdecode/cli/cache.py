"""``fastdecode cache``: list, drop or verify the parked sessions on an R-worker's disk."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.flags import add_common_flags
from fastdecode.core.errors import ChainError, ConfigError

if TYPE_CHECKING:
    from fastdecode.cluster.r_worker.parking.chain_file import ChainReader


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="the parked sessions in an R-worker's --park-dir",
        description="Each file holds the KV cache of one prefix. Its name is a fingerprint of weights, layout and "
        "arithmetic, and a hash of its tokens. A running R-worker recomputes what it does not find.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, run, text in (
        ("ls", run_ls, "list the files, least recently used first"),
        ("drop", run_drop, "remove files"),
        ("verify", run_verify, "check every byte of every file against its checksums; exit 1 if one is damaged"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("park_dir", metavar="DIR", help="folder that an R-worker got as --park-dir")
        if name == "ls":
            action.add_argument("--json", action="store_true", help="print one JSON object per file")
        else:
            action.add_argument(
                "names", nargs="*", metavar="FILE",
                help="names of files, as `fastdecode cache ls` prints them; verify without names checks all",
            )  # fmt: skip
        if name == "drop":
            action.add_argument("--all", action="store_true", help="delete every file")
            action.add_argument(
                "--unused", type=float, metavar="SECONDS", help="delete files that were not used for this many seconds"
            )
        add_common_flags(action)
        action.set_defaults(run=run)


def run_ls(args: argparse.Namespace) -> int:
    """Print the content of each parked session's file, or why the file cannot be read."""
    for path in _files(args.park_dir):
        row = _row(path)
        if args.json:
            print(json.dumps(row))
        elif "error" in row:
            print(f"{path.name}  {row['error']}")
        else:
            print("{file}  {tokens:>8,} tokens  {bytes:>13,} bytes  unused {unused_seconds:>9,.0f} s  {cache}".format(
                **row, cache=f"{row['kv_cache_dtype']}, {row['isa']}"
            ))  # fmt: skip
    return 0


def run_drop(args: argparse.Namespace) -> int:
    """Delete the parked files in ``args.names``, or all; with --unused SECONDS only files unused for that long."""
    if not (args.names or args.all or args.unused is not None):
        raise ConfigError("cache drop: name files, or give --unused SECONDS or --all")
    num_bytes = count = 0
    for path in _named(args):
        unused = time.time() - path.stat().st_mtime
        if args.unused is None or unused >= args.unused:
            num_bytes, count = num_bytes + path.stat().st_size, count + 1
            path.unlink()
    print(f"removed {count} {'file' if count == 1 else 'files'}, {num_bytes:,} bytes")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Check every byte of each named file, and print whether it is intact."""
    good = bad = 0
    for path in _named(args):
        try:
            with _open(path) as reader:
                for _ in reader.pieces():
                    pass
            good += 1
        except ChainError as error:
            print(error)
            bad += 1
    told = f"{good + bad} {'file' if good + bad == 1 else 'files'} checked: {good} intact, {bad} damaged"
    print(f"{told}; `fastdecode cache drop {args.park_dir} FILE` removes one" if bad else told)
    return 1 if bad else 0


def _files(folder: str) -> list[Path]:
    from fastdecode.cluster.r_worker.parking.directory import chain_files

    if not Path(folder).is_dir():
        raise ConfigError(f"park_dir: there is no folder {folder!r}")
    return chain_files(Path(folder))


def _named(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the files in the parking folder that ``args.names`` lists, or all. Raise ConfigError for a missing file."""
    files = {path.name: path for path in _files(args.park_dir)}
    if unknown := set(args.names) - set(files):
        raise ConfigError(f"cache: {args.park_dir} has no file {min(unknown)}; `fastdecode cache ls` names them")
    yield from (files[name] for name in args.names or files)


def _open(path: Path) -> ChainReader:
    from fastdecode.cluster.r_worker.parking.chain_file import ChainReader

    reader = ChainReader(path)
    if path.name != reader.name:
        reader.close()
        raise ChainError(f"{path}: this file belongs to another prefix; its right name is {reader.name}")
    return reader


def _row(path: Path) -> dict[str, Any]:
    row = {"file": path.name, "bytes": path.stat().st_size, "unused_seconds": time.time() - path.stat().st_mtime}
    try:
        with _open(path) as reader:
            head = reader.head
    except ChainError as error:
        return row | {"error": str(error).removeprefix(f"{path}: ")}
    return row | {
        "tokens": head.num_tokens,
        "block_size": head.block_size,
        "dtype": head.model_dtype,
        "kv_cache_dtype": head.kv_dtype,
        "isa": head.isa,
        "fingerprint": head.fingerprint,
    }
