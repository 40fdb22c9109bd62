"""The engine's side of R-workers on Ray: the process that speaks with Ray, and the backend over R-workers that join."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from typing import Any

from fastdecode.api.settings import is_loopback, split_address
from fastdecode.cluster.pool.joining import JoinListener
from fastdecode.cluster.pool.tcp import JoiningBackend
from fastdecode.cluster.wire.handshake import Security, read_secret
from fastdecode.core.errors import BackendError, CapacityError, ConfigError, FastDecodeError
from fastdecode.core.types import RWorkerInfo
from fastdecode.kinds.layout import KVLayout

START_SECONDS = 120.0
"""Most seconds from the start of the actors until all have joined."""

log = logging.getLogger(__name__)


def check_installed() -> None:
    """Raise ConfigError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("r_workers: ray:N needs Ray: pip install 'fastdecode[ray]'")


class RayJob:
    """A reservation of CPUs and memory in a Ray cluster for R-workers, and the R-workers (actors) started there.

    Without ``key_file`` it draws a random key. ``host``: this node's address in the cluster. ``is_alone``: the cluster
    was started for this job on this machine; then connections are not encrypted unless a setting asks for it.
    """

    def __init__(
        self,
        count: int,
        num_threads: int | None,
        kv_cache_bytes: int | None,
        strict: bool = False,
        key_file: str | None = None,
        security: str | None = None,
    ) -> None:
        """Wait until Ray has reserved the resources. Raise CapacityError, with what is missing, if it cannot."""
        check_installed()
        secret = read_secret(key_file) if key_file else secrets.token_hex(32).encode()
        self.count = count
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        code = "from fastdecode.cluster.ray.driver import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, name="Ray", daemon=True).start()
        try:
            names = ("count", "num_threads", "kv_cache_bytes", "strict")
            self._tell(dict(zip(names, (count, num_threads, kv_cache_bytes, strict), strict=True)))
            placed = self._next(None)
        except BaseException:
            self.end()
            raise
        self.host, self.is_alone = str(placed["host"]), bool(placed["is_alone"])
        is_told = security is not None or key_file is not None
        self.security = Security(secret, security != "authenticate" if is_told else not self.is_alone)
        log.warning("Ray placed %s", placed["placed"])

    def start(self, pool: str) -> None:
        """Start the actors, which join at ``pool`` ("host:port")."""
        secret = self.security.secret or b""
        self._tell({"pool": pool, "secret": secret.decode(), "encrypts": self.security.encrypts})

    def check(self) -> None:
        """Raise the error of an actor that failed, if any; never waits."""
        while not self._said.empty():
            log.info("Ray started an R-worker: %s", self._next(None).get("started"))

    def end(self) -> None:
        """End the actors; may be called twice."""
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        # Most seconds for the process that speaks with Ray to end. A cluster that it has started ends with it.
        end_seconds = 30.0
        try:
            self.process.wait(end_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _tell(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended; ``_next`` will raise why
            print(json.dumps(what), file=self.process.stdin, flush=True)

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self._said.put(json.loads(line))
        self._said.put(None)

    def _next(self, timeout_seconds: float | None) -> dict[str, Any]:
        said = self._said.get(timeout=timeout_seconds)
        if said is None:
            raise BackendError(f"the process that speaks with Ray has ended with status {self.process.wait()}")
        errors: dict[str, type[FastDecodeError]] = {
            "config": ConfigError,
            "capacity": CapacityError,
            "backend": BackendError,
        }
        if "refused" in said:
            raise errors.get(said["refused"], BackendError)(said["message"])
        return said


class RayBackend(JoiningBackend):
    """An ``AttentionBackend`` over the actors of a ``RayJob``, which it starts and ends. It needs a join listener.

    An actor that Ray restarts joins again like any R-worker.
    """

    def __init__(self, job: RayJob) -> None:
        super().__init__(job.count)
        self._job, self._deadline = job, 0.0

    @property
    def security(self) -> Security:
        """The security of the connections to its R-workers."""
        return self._job.security

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        if self.join_listener is None:
            raise BackendError("R-workers on Ray join the pool: give it a join listener")
        self._job.start(self._reachable(self.join_listener))
        self._deadline = time.monotonic() + START_SECONDS
        return super().open(layout)

    def wait_for_more(self) -> None:
        self._job.check()
        if time.monotonic() > self._deadline:
            raise BackendError(
                f"r_workers: not all of {self._job.count} R-workers on Ray have joined within {START_SECONDS:g} s; "
                f"their logs are in Ray's: ray logs, or session_latest/logs on their nodes"
            )
        super().wait_for_more()

    def close(self) -> None:
        super().close()
        self._job.end()

    def _reachable(self, listener: JoinListener) -> str:
        """Return the address of ``listener`` for other nodes. Raise ConfigError if they cannot reach it."""
        host, port = split_address("pool_listen", listener.address)
        if is_loopback(host) and not self._job.is_alone:
            raise ConfigError(f"pool_listen: {host} cannot be reached from other nodes of the Ray cluster")
        return f"{self._job.host if host in ('*', '0.0.0.0') else host}:{port}"
