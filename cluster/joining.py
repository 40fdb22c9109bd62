"""An R-worker that asks to be let into a pool."""

from __future__ import annotations

import contextlib
import socket
import time

from fastdecode.addresses import split_address
from fastdecode.cluster.frames import Conversation, Kind
from fastdecode.cluster.messages import encode_join
from fastdecode.cluster.zeromq import R_WORKER, ZmqChannel
from fastdecode.errors import ConfigError

ASK_SECONDS = 1.0
"""Time between questions: an S-worker may not be there yet, or not have noticed that this R-worker was lost."""


class Joiner:
    """Asks the S-worker at ``pool`` to connect to ``address``, as often as it takes; both are "host:port"."""

    def __init__(self, pool: str, address: str, secret: bytes | None) -> None:
        self._pool, self._address, self._secret = pool, address, secret
        self._channel: ZmqChannel | None = None
        self._next = 0.0

    def ask(self) -> None:
        """Ask, unless that was just done; over a new connection each time, so that old questions do not pile up."""
        if time.monotonic() < self._next:
            return
        self.close()
        self._next = time.monotonic() + ASK_SECONDS
        self._channel = ZmqChannel(self._pool, self._secret, role=R_WORKER)
        with contextlib.suppress(ConnectionError):
            Conversation(self._channel).send(Kind.JOIN, encode_join(self._address))

    def close(self) -> None:
        """May be called twice."""
        if self._channel:
            self._channel.close()
            self._channel = None


def local_address(pool: str) -> str:
    """The address of this machine from which ``pool``, "host:port", is reached; ConfigError when it is not."""
    host, port = split_address("join", pool)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"join: {host} cannot be reached from here: {error.strerror}") from None
