"""``fastdecode prefill-worker``: one prefill worker, which computes prompts for an S-worker."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from typing import Any

from fastdecode.cli.flags import (
    add_common_flags,
    add_flags,
    add_worker_flags,
    check_cores,
    check_threads,
    listen_address,
)
from fastdecode.config import MODEL, EngineConfig, flag_names
from fastdecode.machine import usable_cores
from fastdecode.settings import check_key, check_security, describe_security, parse_cores, split_address

LISTEN = "tcp://127.0.0.1:5590"


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "prefill-worker",
        help="one prefill worker: computes prompts for an S-worker on this or another host",
        description="Serves one S-worker after another, with the same model and weights as theirs. A prompt that is "
        "shared by several goes through them as a chain; each sends its keys and values to the sequence's R-worker.",
    )
    add_worker_flags(parser, LISTEN)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # of --prefill-workers spawn:N, which starts this
    parser.add_argument("--engine-config", type=json.loads, help=argparse.SUPPRESS)
    group = parser.add_argument_group("model, as the S-worker's")
    add_flags(group, EngineConfig, [name for name in flag_names(MODEL) if "tokenizer" not in name])
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the address and serve; SIGTERM ends the process with status 0, Ctrl-C with 130."""
    from fastdecode.cluster.joining import Joiner, local_address
    from fastdecode.cluster.links.spawn import die_with
    from fastdecode.cluster.prefill.connect import ANSWER
    from fastdecode.cluster.wire.handshake import read_security
    from fastdecode.cluster.wire.messages import PREFILL_WORKER

    if args.parent is not None:
        die_with(args.parent)
    config = _config(args)
    cores = _bind(parse_cores("cores", args.cores))
    check_threads(args.threads)
    towards = local_address(args.join) if args.join else None
    host, port = listen_address(args.listen or (f"tcp://{towards}:0" if towards else LISTEN))
    check_key("listen", [host], args.key_file)
    if args.join:
        check_key("join", [split_address("join", args.join)[0]], args.key_file)
    check_security(args.security, args.key_file)
    security = read_security(args.key_file, args.security)
    signal.signal(signal.SIGTERM, _end)
    with contextlib.suppress(SystemExit):
        from fastdecode.prefill_worker import PrefillWorker

        worker = PrefillWorker(config, args.threads or len(cores), cores, security)
        address = worker.listen(host, port)
        guard = describe_security(args.security, args.key_file)
        print(f"{ANSWER}tcp://{address} ({guard}), {args.threads or len(cores)} thread(s)", flush=True)
        mine = f"{towards if host == '*' else host}:{address.rpartition(':')[2]}"
        joiner = Joiner(args.join, mine, security.secret, PREFILL_WORKER) if args.join else None
        worker.run(lambda is_free: joiner.ask() if joiner and is_free else None)
    print("fastdecode prefill-worker: ended", flush=True)
    return 0


def _config(args: argparse.Namespace) -> EngineConfig:
    names = [*flag_names(MODEL), "seed"]
    given = args.engine_config or {name: getattr(args, name) for name in names if hasattr(args, name)}
    return EngineConfig(**given)


def _bind(cores: list[int] | None) -> tuple[int, ...]:
    check_cores(cores)
    if cores:
        os.sched_setaffinity(0, cores)
    return tuple(cores or usable_cores())


def _end(number: int, frame: Any) -> None:
    raise SystemExit(0)
