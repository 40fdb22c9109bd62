"""``fastdecode prefill-worker``: one prefill worker, which computes prompts for an S-worker."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdecode.api.config import EngineConfig, prefill_settings
from fastdecode.api.settings import check_key, check_security, describe_security, is_loopback, parse_cores
from fastdecode.cli.flags import (
    PREFILL_MODEL,
    add_common_flags,
    add_flags,
    add_worker_flags,
    check_cores,
    check_threads,
    check_transport,
    listen_address,
    say_mended,
)
from fastdecode.cli.r_worker import listen_place
from fastdecode.core.machine import usable_cores
from fastdecode.core.optional import optional
from fastdecode.core.parent import die_with

if TYPE_CHECKING:
    from fastdecode.cluster.wire.handshake import Security
    from fastdecode.prefills.worker import PrefillWorker

LISTEN = "tcp://127.0.0.1:5590"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "prefill-worker",
        help="one prefill worker: computes prompts for an S-worker on this or another host",
        description="Serves one S-worker after another, with the same model and weights as theirs. A prompt that is "
        "shared by several goes through them as a chain; each sends its keys and values to the sequence's R-worker.",
    )
    add_worker_flags(parser, LISTEN)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # set by an S-worker's spawn:N
    parser.add_argument("--engine-config", type=json.loads, help=argparse.SUPPRESS)
    group = parser.add_argument_group("model, as the S-worker's")
    add_flags(group, EngineConfig, PREFILL_MODEL)
    add_common_flags(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Setup:
    """The settings of a prefill worker. ``guard`` describes how its connections are secured."""

    config: EngineConfig
    num_threads: int
    cores: tuple[int, ...]
    security: Security
    guard: str

    def start(self, host: str, port: int, rank: str = "") -> tuple[PrefillWorker, str]:
        """Start a worker that listens at ``host`` and ``port``, and print its address. Return both."""
        from fastdecode.cluster.wire.messages import ANSWER
        from fastdecode.prefills.worker import PrefillWorker

        worker = PrefillWorker(self.config, self.num_threads, self.cores, self.security)
        address = worker.listen(host, port)
        print(f"{ANSWER}{rank}tcp://{address} ({self.guard}), {self.num_threads} thread(s)", flush=True)
        return worker, address


def run(args: argparse.Namespace) -> int:
    """Print the worker's address and serve; return the exit status: 0 after SIGTERM, 130 after Ctrl-C."""
    from fastdecode.cluster.wire.handshake import read_security

    check_transport(args.transport, args.join)
    if args.transport == "mpi":
        say_mended()
    if args.parent is not None:
        die_with(args.parent)
    config = _config(args)
    cores = _bind(parse_cores("cores", args.cores))
    check_threads(args.threads)
    check_security(args.security, args.key_file)
    guard = describe_security(args.security, args.key_file)
    security = read_security(args.key_file, args.security)
    setup = _Setup(config, args.threads or len(cores), cores, security, guard)
    if args.transport == "mpi":
        _serve_job(args, setup)
        return 0
    signal.signal(signal.SIGTERM, _end)
    with contextlib.suppress(SystemExit):
        _listen(args, setup)
    print("fastdecode prefill-worker: ended", flush=True)
    return 0


def _listen(args: argparse.Namespace, setup: _Setup) -> None:
    from fastdecode.cluster.r_worker.joiner import Joiner
    from fastdecode.cluster.wire.messages import PREFILL_WORKER

    host, port, reached_at = listen_place(args, LISTEN)
    worker, address = setup.start(host, port)
    mine = f"{reached_at}:{address.rpartition(':')[2]}"
    joiner = Joiner(args.join, mine, setup.security.secret, PREFILL_WORKER) if args.join else None
    worker.run(lambda is_free: joiner.ask() if joiner and is_free else None)


def _serve_job(args: argparse.Namespace, setup: _Setup) -> None:
    """Serve as a rank of an MPI job: listen at an address that the other ranks reach, until the job ends."""
    from fastdecode.cluster.r_worker.joiner import local_address

    given = listen_address(args.listen) if args.listen else None

    def serve(rank: Any, s_worker_host: str) -> None:
        # Any port number will do to look up the route to a host; nothing is sent
        any_port = 9
        towards = s_worker_host if is_loopback(s_worker_host) else local_address(f"{s_worker_host}:{any_port}")
        host, port = given or (towards, 0)
        check_key("listen", [host], args.key_file)
        worker, address = setup.start(host, port, f"MPI rank {rank.job.rank}, ")
        rank.announce(towards if host == "*" else host, int(address.rpartition(":")[2]))
        with contextlib.suppress(_JobIsOver):
            worker.run(lambda is_free: _end_with(rank))

    optional("MPI job").serve_as_prefill_worker(serve)


class _JobIsOver(Exception):
    """Raised to end the worker's loop, since its MPI job has ended."""


def _end_with(rank: Any) -> None:
    if rank.is_over:
        raise _JobIsOver


def _config(args: argparse.Namespace) -> EngineConfig:
    given = args.engine_config or {name: getattr(args, name) for name in prefill_settings() if hasattr(args, name)}
    return EngineConfig(**given)


def _bind(cores: list[int] | None) -> tuple[int, ...]:
    check_cores(cores)
    if cores:
        os.sched_setaffinity(0, cores)
    return tuple(cores or usable_cores())


def _end(number: int, frame: Any) -> None:
    raise SystemExit(0)
