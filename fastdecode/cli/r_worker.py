"""``fastdecode r-worker``: one R-worker, which holds the KV cache of an S-worker. It never imports torch."""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from fastdecode.api.settings import (
    check_key,
    check_security,
    describe_security,
    parse_cores,
    parse_kv_cache_memory,
    parse_park,
    split_address,
)
from fastdecode.cli.flags import (
    add_common_flags,
    add_worker_flags,
    check_cores,
    check_threads,
    check_transport,
    listen_address,
    say_mended,
)
from fastdecode.core.errors import ConfigError
from fastdecode.core.optional import optional
from fastdecode.core.parent import die_with
from fastdecode.core.parked import PARK_AFTER, ParkPlace

if TYPE_CHECKING:
    from fastdecode.cluster.r_worker.server import Server


LISTEN = "tcp://127.0.0.1:5580"

Resources: TypeAlias = tuple[list[int] | None, int | None, int | None, ParkPlace | None]
"""Core numbers, number of threads, KV cache bytes (None: chosen for this machine), and where to park sessions."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "r-worker",
        help="one R-worker: KV cache and attention for an S-worker on this or another host",
        description="Serves one S-worker after another. When an S-worker leaves, its caches are freed, or kept for its "
        "session. On SIGTERM, the S-worker moves the sequences of this R-worker to others, then this process ends; "
        "on a second SIGTERM it ends at once.",
    )
    add_worker_flags(parser, LISTEN)
    parser.add_argument(
        "--kv-cache-memory", metavar="BYTES", help="memory of the KV cache, such as 4GiB (40 %% of the free memory)"
    )
    parser.add_argument(
        "--park-dir", metavar="DIR",
        help="folder in which the R-worker stores unused prefixes, to read them back later (none)",
    )  # fmt: skip
    parser.add_argument(
        "--park-after", type=float, metavar="SECONDS",
        help=f"seconds without use after which a prefix is stored in --park-dir ({PARK_AFTER:g})",
    )  # fmt: skip
    parser.add_argument(
        "--park-bytes", metavar="BYTES",
        help="most bytes in --park-dir, such as 100GiB; the least recently used files are deleted "
            "first (half of the free disk space)",
    )  # fmt: skip
    parser.add_argument(
        "--health-listen", metavar="HOST:PORT",
        help="address for GET /health (200, or 503 if the R-worker cannot serve) and /metrics "
            "(Prometheus), without a key; port 0: any (none)",
    )  # fmt: skip
    for name in ("--control-fd", "--memory-fd", "--parent"):  # set by an S-worker's spawn:N
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--inject-faults", help=argparse.SUPPRESS)  # tests of --audit need faults
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the address and serve; return the exit status: 0 after SIGTERM, 130 after Ctrl-C."""
    check_transport(args.transport, args.join)
    if args.health_listen and args.transport == "mpi":
        raise ConfigError("health_listen: R-workers of an MPI job have no health page; leave --transport out")
    if args.transport == "mpi":
        say_mended()
    resources = _resources(args)
    if args.control_fd is not None:
        return _serve_parent(args, resources)
    check_cores(resources[0])
    if args.transport == "mpi":
        return _serve_job(args, resources)
    signal.signal(signal.SIGTERM, partial(_end, None))
    with contextlib.suppress(SystemExit):
        _listen(args, resources)
    print("fastdecode r-worker: ended", flush=True)
    return 0


def _resources(args: argparse.Namespace) -> Resources:
    """Return the resources that the flags ``args`` set; None for each resource that no flag sets.

    A ConfigError names the flag.
    """
    cores = parse_cores("cores", args.cores)
    check_threads(args.threads)
    wanted = args.kv_cache_memory
    park = parse_park(args.park_dir, args.park_after, args.park_bytes)
    return cores, args.threads, None if wanted is None else parse_kv_cache_memory(wanted), park


def _serve_parent(args: argparse.Namespace, resources: Resources) -> int:
    """Serve the S-worker that started this process, on the cores that the S-worker chose."""
    from fastdecode.cluster.links.shared_memory import SharedMemoryLink
    from fastdecode.cluster.r_worker.host import take_host
    from fastdecode.cluster.r_worker.session import Session
    from fastdecode.cluster.wire.handshake import read_security

    if args.parent is not None:
        die_with(args.parent)
    security = read_security(args.key_file, args.security)
    with contextlib.closing(take_host(*resources)) as machine:
        link = SharedMemoryLink(socket.socket(fileno=args.control_fd), args.memory_fd, is_s_worker=False)
        with contextlib.closing(link):
            Session(link, machine, security=security).run()
    return 0


def _serve_job(args: argparse.Namespace, resources: Resources) -> int:
    """Serve as a rank of an MPI job. This checks the machine before MPI_Init, so that a failed check ends the job."""
    from fastdecode.cluster.r_worker.host import take_host
    from fastdecode.cluster.wire.handshake import read_security

    check_security(args.security, args.key_file)
    security = read_security(args.key_file, args.security)
    with contextlib.closing(take_host(*resources)) as machine:
        told = machine.describe()
        optional("MPI serving").serve_job(
            machine, lambda rank: print(f"fastdecode r-worker: MPI rank {rank}, {told}", flush=True), security
        )
    return 0


def _listen(args: argparse.Namespace, resources: Resources) -> None:
    from fastdecode.cluster.links.zeromq import ZmqListener
    from fastdecode.cluster.r_worker.health import HealthPort
    from fastdecode.cluster.r_worker.host import take_host
    from fastdecode.cluster.r_worker.joiner import Joiner
    from fastdecode.cluster.r_worker.server import Server
    from fastdecode.cluster.r_worker.vitals import Vitals
    from fastdecode.cluster.wire.handshake import read_security

    host, port, reached_at = listen_place(args, LISTEN)
    check_security(args.security, args.key_file)
    security = read_security(args.key_file, args.security)
    vitals = Vitals()
    health = HealthPort(*split_address("health_listen", args.health_listen, 0), vitals) if args.health_listen else None
    listener = ZmqListener(host, port, security.curve_secret)
    ending = contextlib.ExitStack()
    try:
        machine = ending.enter_context(contextlib.closing(take_host(*resources)))
        if args.inject_faults:
            machine = replace(machine, faults=optional("faults").Faults.of(args.inject_faults))
        vitals.is_ready = True
        guard = describe_security(args.security, args.key_file)
        print(f"fastdecode r-worker: {listener.address} ({guard}), {machine.describe()}", flush=True)
        if health:
            print(f"fastdecode r-worker: health at http://{health.address}/health", flush=True)
        mine = f"{reached_at}:{listener.address.rpartition(':')[2]}"
        joiner = Joiner(args.join, mine, security.secret) if args.join else None
        server = Server(listener, machine, joiner, security, host, vitals)
        signal.signal(signal.SIGTERM, partial(_end, server))
        server.run()
    finally:
        listener.close()
        if health:
            health.close()
        ending.close()


def listen_place(args: argparse.Namespace, unless_given: str) -> tuple[str, int, str | None]:
    """Return the host and port to listen on, and with --join the host name by which the S-worker reaches this host.

    Raise ConfigError if a key file is needed and missing.
    """
    from fastdecode.cluster.r_worker.joiner import local_address

    towards = local_address(args.join) if args.join else None
    host, port = listen_address(args.listen or (f"tcp://{towards}:0" if towards else unless_given))
    check_key("listen", [host], args.key_file)
    if args.join:
        check_key("join", [split_address("join", args.join)[0]], args.key_file)
    return host, port, towards if host == "*" else host


def _end(server: Server | None, number: int, frame: Any) -> None:
    """Handle signal ``number``: exit at once, or first let a connected S-worker move its sequences elsewhere."""
    if server is None or not server.leave():
        raise SystemExit(0)
    print("fastdecode r-worker: leaving as soon as its sequences have moved", flush=True)
