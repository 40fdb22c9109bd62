"""The S-worker's side of R-workers over TCP; the R-workers' side is ``r_worker/server.py``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from fastdecode.api.settings import split_address
from fastdecode.cluster.links.link import SILENCE_SECONDS, TICK_SECONDS
from fastdecode.cluster.links.tcp import connect
from fastdecode.cluster.links.zeromq import ZmqListener
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.joining import JoinListener
from fastdecode.cluster.pool.remote import TAKE_SECONDS, RemoteWorker
from fastdecode.cluster.pool.worker import PoolWorker
from fastdecode.cluster.wire.handshake import S_WORKER, Security, read_security
from fastdecode.cluster.wire.leases import LEASE_SECONDS, AskedLease
from fastdecode.core.errors import ConfigError
from fastdecode.core.types import RWorkerInfo
from fastdecode.kinds.layout import KVLayout

SETTLE_SECONDS = LEASE_SECONDS + 0.5
"""Most seconds from when the first R-worker notices the loss of an S-worker to when the last one does."""

MEETING_SECONDS = 3.0
"""Most seconds in which a standby waits for an R-worker's host to accept its connection, which needs no Python.

A host that is only starting may return later.
"""

log = logging.getLogger("fastdecode.r_worker")


class TcpBackend(PoolBackend):
    """An ``AttentionBackend`` over R-workers that listen at ``addresses`` ("host:port").

    ``key_file``: the secret of both sides; without it connections are neither authenticated nor encrypted.
    ``security``: "encrypt" (also None), or "authenticate", which leaves data unencrypted. ``silence_seconds``: an
    R-worker silent for this long is lost; if it listens again later, it is used again. ``lease``: the named session to
    ask for. ``in_order``: open R-workers one after another. So if two S-workers compete, the one that gets the first
    R-worker gets all; an R-worker without a connection after ``MEETING_SECONDS`` is lost. ``may_miss``: ``open``
    continues without lost R-workers, for instance if they were killed with the previous engine.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        block_size: int,
        key_file: str | None = None,
        security: str | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        lease: AskedLease | None = None,
        in_order: bool = False,
        may_miss: bool = False,
    ) -> None:
        link = partial(connect, security=read_security(key_file, security), silence_seconds=silence_seconds)
        if lease is not None:
            meeting = MEETING_SECONDS if in_order else math.inf
            link = partial(link, patience_seconds=LEASE_SECONDS, beats=True, meeting_seconds=meeting)
        self._in_order, self._misses = in_order, may_miss
        seconds = [TAKE_SECONDS] * len(addresses)
        if lease is not None and lease.waits:
            seconds = [0.0] + [SETTLE_SECONDS] * (len(addresses) - 1)
        super().__init__(
            [
                RemoteWorker(each, partial(link, each), block_size, lease, most)
                for each, most in zip(addresses, seconds, strict=True)
            ]
        )
        self._addresses = frozenset(addresses)

    def _open_all(self, layout: KVLayout) -> list[RWorkerInfo]:
        if not self._in_order:
            return super()._open_all(layout)
        found = [info for worker in list(self.workers) for info in self._open_some([worker], layout)]
        for worker in self.workers:
            if isinstance(worker, RemoteWorker) and worker.link:
                worker.link.begin_beats()
        return found

    def _leave_unopened(self) -> None:
        """Close all links without a BYE, so that R-workers keep their sequences for the next S-worker."""
        self.break_off()

    def _may_miss(self, worker: PoolWorker) -> bool:
        return self._misses or super()._may_miss(worker)

    def _anew(self, gone: PoolWorker, is_last: bool) -> Callable[[], RemoteWorker] | None:
        return gone.anew if isinstance(gone, RemoteWorker) and gone.name in self._addresses else None


class JoiningBackend(PoolBackend):
    """An ``AttentionBackend`` over R-workers that join at a listener; ``open`` waits until ``count`` have joined."""

    def __init__(self, count: int) -> None:
        super().__init__([])
        self._count = count

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        infos = super().open(layout)
        try:
            while len(infos) < self._count:
                self.wait_for_more()
                for info in self.admit().values():
                    infos.append(info)
                    log.info("%s has joined: %d of %d R-workers", info.name, len(infos), self._count)
        except BaseException:
            self.close()
            raise
        self.joined.clear()
        return infos

    def wait_for_more(self) -> None:
        """Wait a moment for R-workers to join. Raise an error if no more can come."""
        time.sleep(TICK_SECONDS)


def listen_for_joins(
    address: str,
    block_size: int,
    key_file: str | None = None,
    security: str | None = None,
    silence_seconds: float = SILENCE_SECONDS,
) -> JoinListener:
    """Listen at ``address`` ("host:port") for R-workers that join a pool. Raise ConfigError if listening fails.

    Messages to this listener are encrypted whenever there is a key. ``security``: for the links to the R-workers.
    """
    return join_listener(address, block_size, read_security(key_file, security), silence_seconds)


def join_listener(
    address: str, block_size: int, both: Security, silence_seconds: float = SILENCE_SECONDS
) -> JoinListener:
    """Listen as ``listen_for_joins`` does. ``both``: key and security level of the listener and of the links."""
    host, port = split_address("pool_listen", address, least_port=0)
    try:
        listener = ZmqListener("127.0.0.1" if host == "localhost" else host, port, both.secret, role=S_WORKER)
    except OSError as error:
        raise ConfigError(f"pool_listen: {error.strerror}") from None
    link = partial(connect, security=both, silence_seconds=silence_seconds)
    return JoinListener(listener, link, block_size)
