"""Makes an S-worker's pool of prefill workers: started processes, listening ones, or ranks of the MPI job."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.links.tcp import connect
from fastdecode.cluster.prefill.client import PrefillClient
from fastdecode.cluster.prefill.pool import PrefillPool
from fastdecode.cluster.wire.handshake import Security
from fastdecode.cluster.wire.messages import ANSWER
from fastdecode.core.errors import BackendError
from fastdecode.core.parent import parent_flags

if TYPE_CHECKING:
    from fastdecode.cluster.links.mpi_job import SWorkerRank


def listening_workers(addresses: Sequence[str], security: Security) -> PrefillPool:
    """Return a pool of prefill workers that listen at ``addresses``, "host:port"."""
    clients = [PrefillClient(address, partial(connect, address, security)) for address in addresses]
    return PrefillPool(clients, lambda: addresses, partial(connect, security=security))


def spawned_workers(
    count: int,
    engine_config: Mapping[str, Any],
    num_threads: int,
    cores: Sequence[int],
    key_file: str | None,
    security: Security,
) -> PrefillPool:
    """Start ``count`` prefill workers here, each on the next ``num_threads`` of ``cores``; return their pool."""
    turns = itertools.cycle(cores)
    flags = ["--engine-config", json.dumps(dict(engine_config)), "--threads", str(num_threads)]
    if key_file:
        flags += ["--key-file", key_file, "--security", "encrypt" if security.encrypts else "authenticate"]
    processes = [
        _Spawned([*flags, "--cores", ",".join(map(str, sorted(set(itertools.islice(turns, num_threads)))))])
        for _ in range(count)
    ]
    clients = [
        PrefillClient(f"spawn-{index}", partial(_connect, process, security), process.end, process.process.pid)
        for index, process in enumerate(processes)
    ]
    return PrefillPool(clients, lambda: [process.address for process in processes], partial(connect, security=security))


def ranked_workers(security: Security) -> PrefillPool:
    """Return a pool of the prefill workers among this MPI job's ranks. They listen after loading their models."""
    from fastdecode.cluster.links.mpi_job import Role, join_as_s_worker

    job = join_as_s_worker()
    ranks = job.of(Role.PREFILL_WORKER)
    clients = [PrefillClient(f"rank-{rank}", partial(_connect_rank, job, rank, security)) for rank in ranks]
    return PrefillPool(clients, lambda: [job.address(rank) for rank in ranks], partial(connect, security=security))


def _connect_rank(job: SWorkerRank, rank: int, security: Security) -> Link:
    return connect(job.address(rank), security)


def _connect(process: _Spawned, security: Security) -> Link:
    return connect(process.address, security)


class _Spawned:
    """A prefill worker's process that this engine started, and the worker's address once it listens."""

    def __init__(self, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "fastdecode.cli.main", "prefill-worker", "--listen", "tcp://127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, *parent_flags(), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C must reach only the S-worker
        )
        self._address = ""

    @property
    def address(self) -> str:
        """The worker's "host:port"; waits until the worker listens. Raise BackendError if the process ends first."""
        while not self._address:
            line = self.process.stdout.readline() if self.process.stdout else ""
            if not line:
                raise BackendError(f"a prefill worker did not start: its process ended with {self.process.wait()}")
            if line.startswith(ANSWER) and "://" in line:
                self._address = line.removeprefix(ANSWER).split()[0].removeprefix("tcp://")
        return self._address

    def end(self) -> None:
        """End the process; may be called twice."""
        self.process.send_signal(signal.SIGTERM)
        # Most seconds for a spawned prefill worker to end; then it is killed
        end_seconds = 5.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(end_seconds)
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
