"""Start and end of an MPI job: the roles of its ranks, and the addresses of its prefill workers.

The first rank is the S-worker. Each other rank announces whether it is an R-worker or a prefill worker. R-workers
communicate over MPI, prefill workers over TCP. When the S-worker says that the job begins, each prefill worker loads
its model, listens for connections and answers with its address. Then it works as if started with ``--listen``.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import ipaddress
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from fastdecode.api.settings import check_key
from fastdecode.cluster.links.link import FRAME_FOLLOWS, TICK_SECONDS
from fastdecode.core.errors import BackendError, ConfigError, FastDecodeError
from fastdecode.core.machine import host_id, own_address

if TYPE_CHECKING:
    from fastdecode.cluster.links.mpi import MpiJob, MpiPeer, SendProgress

HANG_UP = FRAME_FOLLOWS | 1
"""The word that ends a session. The receiver sends it back, so that no message of the session remains."""

OVER = FRAME_FOLLOWS | 2
"""The word that ends the job. The receiver sends it back."""

S_RANK = 0
LEAVE_SECONDS = 10
"""Most seconds that a rank may take to answer OVER."""

RIGHT_LINE = (
    "mpirun -n 1 fastdecode bench throughput --r-workers mpi … : -n 4 fastdecode r-worker --transport mpi "
    "(`fastdecode launch --print` writes it for your hosts)"
)
PREFILL_LINE = (
    "mpirun -n 1 fastdecode bench throughput --r-workers mpi --prefill-workers mpi:2 … : -n 4 fastdecode r-worker "
    "--transport mpi : -n 2 fastdecode prefill-worker --transport mpi … (docs/launching.md)"
)


class Role(IntEnum):
    S_WORKER = 1
    R_WORKER = 2
    PREFILL_WORKER = 3


_ENTRY = struct.Struct("=B8s")
"""The record that every rank sends to all others: its role, and a number that identifies its machine."""

_NAMES = {Role.S_WORKER: "S-worker", Role.R_WORKER: "R-worker", Role.PREFILL_WORKER: "prefill worker"}
_PORT_BITS = 16


class JobRanks:
    """This process's MPI job. ``roles``: the role of each rank, by rank."""

    def __init__(self, job: MpiJob, role: Role) -> None:
        """Exchange roles with all ranks of ``job``; this waits until every rank has joined."""
        self.job = job
        # Containers on one machine share its host id, so the host name tells them apart
        machine = hashlib.sha256(f"{host_id()} {socket.gethostname()}".encode()).digest()[:8]
        entries = [_ENTRY.unpack(each) for each in job.gather(_ENTRY.pack(role, machine))]
        self.roles = tuple(Role(each) for each, _ in entries)
        self.is_on_one_machine = len({machine for _, machine in entries}) == 1

    def of(self, role: Role) -> list[int]:
        """Return the numbers of the ranks that have ``role``."""
        return [rank for rank, each in enumerate(self.roles) if each is role]


class SWorkerRank(JobRanks):
    """The S-worker's rank in its job. ``progress``: its communication thread."""

    def __init__(self, job: MpiJob) -> None:
        from fastdecode.cluster.links.mpi import SendProgress

        super().__init__(job, Role.S_WORKER)
        self.progress: SendProgress = SendProgress()
        self._has_begun = False
        self._addresses: dict[int, str] = {}

    def begin(self, wants_r_workers: bool, num_prefill_workers: int, key_file: str | None = None) -> None:
        """Check the numbers of R-workers and prefill workers in the job; let prefill workers load their models.

        Raise ConfigError for wrong numbers. A later engine in the same job may pass False or 0 to leave ranks unused.
        """
        self._check(Role.R_WORKER, "r_workers: mpi", None if wants_r_workers else 0)
        self._check(Role.PREFILL_WORKER, f"prefill_workers: mpi:{num_prefill_workers}", num_prefill_workers)
        if self._has_begun:
            return
        loopback = "127.0.0.1"
        host = loopback if self.is_on_one_machine else own_address()
        if num_prefill_workers:
            check_key("prefill_workers: mpi over several machines", [host], key_file)
        for rank in self.of(Role.PREFILL_WORKER):
            self.job.peer(rank).send_word(int(ipaddress.IPv4Address(host)))
        self._has_begun = True

    def _check(self, role: Role, setting: str, wanted: int | None) -> None:
        """Raise ConfigError unless ``wanted`` ranks have the role; None means at least one."""
        found = len(self.of(role))
        command = "fastdecode r-worker" if role is Role.R_WORKER else "fastdecode prefill-worker"
        if wanted is None and not found:
            raise ConfigError(f"{setting}: no rank of this job is an R-worker: {RIGHT_LINE}")
        if wanted and wanted != found:
            raise ConfigError(f"{setting}: this job has {found} rank(s) of `{command}`: {PREFILL_LINE}")
        if wanted == 0 and found and not self._has_begun:
            flag = "--r-workers mpi" if role is Role.R_WORKER else f"--prefill-workers mpi:{found}"
            raise ConfigError(f"this job has {found} rank(s) of `{command}`: give the S-worker {flag}")

    def address(self, rank: int) -> str:
        """Wait until the prefill worker at rank ``rank`` sends its address; return "host:port".

        Raise BackendError if the address does not arrive in time.
        """
        # Most seconds until a prefill worker has loaded its model and listens
        listen_seconds = 300.0
        peer, deadline = self.job.peer(rank), time.monotonic() + listen_seconds
        while rank not in self._addresses:
            if peer.word_is_there(TICK_SECONDS):
                host, port = divmod(peer.take_word(), 1 << _PORT_BITS)
                self._addresses[rank] = f"{ipaddress.IPv4Address(host)}:{port}"
            elif time.monotonic() > deadline:
                raise BackendError(f"prefill worker rank-{rank} did not listen within {listen_seconds:g} s")
        return self._addresses[rank]

    def leave(self) -> None:
        """Tell all ranks that the job is over and wait for their answers; abort the job if one does not answer."""
        self.progress.stop()
        peers = [self.job.peer(rank) for rank in range(1, self.job.size)]
        try:
            for peer in peers:
                peer.send_word(OVER)
            for peer in peers:
                if not peer.await_word(OVER, LEAVE_SECONDS):
                    name = _NAMES[self.roles[peer.rank]]
                    self.job.abort(f"{name} rank {peer.rank} did not end within {LEAVE_SECONDS} s")
                peer.close()
        except ConnectionError as error:
            self.job.abort(f"the job does not end: {error}")


class PrefillRank(JobRanks):
    """A prefill worker's rank in its job."""

    def __init__(self, job: MpiJob) -> None:
        super().__init__(job, Role.PREFILL_WORKER)
        self._peer: MpiPeer = job.peer(S_RANK)
        self._is_over = False

    def s_worker_host(self) -> str | None:
        """Wait for the job to begin; return the S-worker's address, or None if the job has ended without beginning.

        The address is the one for other machines, or loopback if all ranks are on one machine.
        """
        while not self._peer.word_is_there(TICK_SECONDS):
            pass
        word = self._peer.take_word()
        self._is_over = word == OVER
        return None if self._is_over else str(ipaddress.IPv4Address(word))

    def announce(self, host: str, port: int) -> None:
        """Send the S-worker the address at which this prefill worker listens."""
        word = int(ipaddress.IPv4Address(host)) << _PORT_BITS | port
        self._peer.wait([self._peer.send_word(word)], LEAVE_SECONDS)

    @property
    def is_over(self) -> bool:
        """True once the S-worker has said that the job is over."""
        if not self._is_over and self._peer.word_is_there(0.0):
            self._is_over = self._peer.take_word() == OVER
        return self._is_over

    def leave(self) -> None:
        """Confirm to the S-worker that the job is over; afterwards MPI may be finalized."""
        self._peer.wait([self._peer.send_word(OVER)], LEAVE_SECONDS)
        self._peer.close()


@functools.cache
def join_as_s_worker() -> SWorkerRank:
    """Join this process's MPI job as its S-worker, once. However this process ends, the other ranks end with it.

    Raise ConfigError without MPI, or without another rank.
    """
    job = _join()
    if job.size == 1:
        raise ConfigError(
            f"mpi: this process is alone, and R-workers and prefill workers must be in one job with it: {RIGHT_LINE}; "
            f"with prefill workers: {PREFILL_LINE}"
        )
    if job.rank != S_RANK:
        job.abort(f"two S-workers in one job, or not the first: {RIGHT_LINE}")
    rank = SWorkerRank(job)
    atexit.register(rank.leave)
    return rank


def join_as_r_worker() -> JobRanks:
    """Join this process's job as an R-worker. Raise ConfigError if this process is alone."""
    return JobRanks(_join_behind(Role.R_WORKER, RIGHT_LINE), Role.R_WORKER)


def serve_as_prefill_worker(serve: Callable[[PrefillRank, str], None]) -> None:
    """Join this process's job as a prefill worker; call ``serve(rank, s_worker_host)`` when the job begins.

    ``serve`` announces its address, and returns when the job is over. Raise ConfigError if this process is alone. A
    failure ends the job.
    """
    rank = PrefillRank(_join_behind(Role.PREFILL_WORKER, PREFILL_LINE))
    try:
        host = rank.s_worker_host()
        if host is not None:
            serve(rank, host)
        rank.leave()
    except FastDecodeError as error:
        rank.job.abort(f"this prefill worker: {error}")
    except BaseException as error:
        rank.job.abort(f"this prefill worker failed: {type(error).__name__}: {error}")


def _join_behind(role: Role, right_line: str) -> MpiJob:
    """Join the MPI job as a rank other than rank 0; return the job. Errors show ``right_line``, an mpirun line."""
    job = _join()
    if job.size == 1:
        raise ConfigError(
            f"transport mpi: this process is alone, and an S-worker must be in one job with it: {right_line}"
        )
    if job.rank == S_RANK:
        a = "an" if role is Role.R_WORKER else "a"
        job.abort(f"the first rank is the S-worker's, and this is {a} {_NAMES[role]}: {right_line}")
    return job


def _join() -> MpiJob:
    try:
        from fastdecode.cluster.links.mpi import MpiJob
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"mpi needs mpi4py and an MPI library: pip install 'fastdecode[mpi]', or your cluster's MPI with "
            f"mpi4py ({reason})"
        ) from error
    return MpiJob()
