"""An R-worker's, or a prefill worker's, requests to join a running job."""

from __future__ import annotations

import contextlib
import logging
import socket
import time

from fastdecode.api.settings import split_address
from fastdecode.cluster.links.peer import MOST_LOGGED
from fastdecode.cluster.links.zeromq import ZmqChannel
from fastdecode.cluster.wire.frames import Conversation, Kind
from fastdecode.cluster.wire.handshake import R_WORKER
from fastdecode.cluster.wire.messages import encode_join
from fastdecode.core.errors import ConfigError

log = logging.getLogger(__name__)


class Joiner:
    """Asks the S-worker at ``pool`` repeatedly to connect to ``address``; both are "host:port".

    ``trouble``: why JOINs do not arrive, logged once per reason; "" if they do, or if asking has just begun.
    """

    def __init__(self, pool: str, address: str, secret: bytes | None, role: str = R_WORKER) -> None:
        self._pool, self._address, self._secret, self._role = pool, address, secret, role
        self._channel: ZmqChannel | None = None
        self._next, self._failing_since = 0.0, 0.0
        self.trouble = ""
        self._logged: set[str] = set()

    def ask(self) -> None:
        """Send a JOIN unless one was just sent. Each uses a new connection, so that old JOINs do not pile up."""
        if time.monotonic() < self._next:
            return
        self._look()
        self.close()
        # Seconds between two JOINs. The S-worker may not listen yet, or not have noticed that this R-worker was lost.
        ask_seconds = 1.0
        self._next = time.monotonic() + ask_seconds
        self._channel = ZmqChannel(self._pool, self._secret, role=R_WORKER)
        with contextlib.suppress(ConnectionError):
            Conversation(self._channel).send(Kind.JOIN, encode_join(self._address, self._role))

    def close(self) -> None:
        """Stop sending JOINs; may be called twice."""
        if self._channel:
            self._channel.close()
            self._channel = None

    def _look(self) -> None:
        """Check whether the last JOIN was sent, and log a new reason if it was not."""
        now = time.monotonic()
        reason = self._channel.failure() if self._channel else ""
        if not self._channel or not reason:
            self._failing_since = now
        # Seconds for which JOINs fail before the worker reports trouble
        trouble_seconds = 3.0
        self.trouble = f"cannot join {self._pool}: {reason}" if now - self._failing_since > trouble_seconds else ""
        if self.trouble and self.trouble not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(self.trouble)
            log.warning("%s", self.trouble)


def local_address(pool: str) -> str:
    """Return this machine's address on the route to ``pool``, "host:port".

    Raise ConfigError if there is no route.
    """
    host, port = split_address("join", pool)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"join: {host} cannot be reached from here: {error.strerror}") from None
