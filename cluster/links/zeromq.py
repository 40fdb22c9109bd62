"""Channels over ZeroMQ and TCP. Only this file and ``zmq_socket.py`` import zmq.

An R-worker's listener is a ROUTER socket, an S-worker's channel a DEALER. libzmq frames and queues messages;
``wire/frames.py`` checks what arrives. With a secret, libzmq authenticates both ends by CURVE keys derived from it, and
encrypts all data.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from fastdecode.cluster.links.link import SILENCE_SECONDS
from fastdecode.cluster.links.peer import PeerChannel
from fastdecode.cluster.links.zmq_socket import (
    FAILED,
    MAX_QUEUED,
    PATIENCE_SECONDS,
    UNLIKE,
    ZmqSocket,
    send_heartbeats,
    use_curve,
)
from fastdecode.cluster.wire.frames import FRAME_LIMIT, HEADER
from fastdecode.cluster.wire.handshake import R_WORKER, S_WORKER
from fastdecode.core.errors import BackendError

HANDSHAKE_SECONDS = 2.0
"""Seconds after which a missing handshake is diagnosed. A handshake with a ZeroMQ socket takes milliseconds."""

log = logging.getLogger("fastdecode.r_worker")


class ZmqChannel(ZmqSocket):
    """Connects one side, usually an S-worker, to the listener at ``address`` ("host:port").

    ``diagnose`` is called while no handshake succeeds. The function returns the reason, or "" if unknown.
    """

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        role: str = S_WORKER,
        silence_seconds: float = SILENCE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        meeting_seconds: float = math.inf,
    ) -> None:
        """``role``: this side's role.

        This side ends the connection after ``silence_seconds`` without a heartbeat. The other side ends it after
        ``patience_seconds``. The connection fails if no handshake succeeds within ``meeting_seconds``.
        """
        super().__init__(zmq.DEALER, FRAME_LIMIT, 0)
        send_heartbeats(self.socket, silence_seconds, patience_seconds)
        self.diagnose: Callable[[], str] = lambda: ""
        self._next_diagnosis = time.monotonic() + HANDSHAKE_SECONDS
        self._connected, self._meets_until = False, time.monotonic() + meeting_seconds
        if secret is not None:
            self.socket.curve_serverkey = use_curve(self.socket, secret, role)
        try:
            self.socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise BackendError(f"R-worker {address}: {error.strerror}") from None

    def send(self, parts: Sequence[Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        retry_seconds = 0.02  # seconds between two attempts to send to a full queue
        while True:
            try:
                self.send_message(parts, zmq.NOBLOCK)
                return
            except zmq.Again:  # the queue is full, or the other side has refused us, so there is no queue
                self.look_at_connection()
            if time.monotonic() > deadline:
                raise ConnectionError("the peer reads no more messages")
            self.poll(retry_seconds)

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. Empty messages, which only test the connection, are dropped."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.skip()
            try:
                if header := self.socket.recv(zmq.NOBLOCK):
                    return header
            except zmq.Again:
                left = deadline - time.monotonic()
                if timeout_seconds == 0 or left <= 0:
                    return None
                if not self.poll(left):
                    self.look_at_connection()

    def failure(self) -> str:
        """Return why no connection was ever made; "" if a connection was made, even if it has ended."""
        try:
            self.look_at_connection()
        except ConnectionError as error:
            return "" if self._connected else str(error)
        return "" if self._connected else "nobody answers there"

    def look_at_connection(self) -> None:
        """Raise ConnectionError if the connection has ended or cannot be made."""
        events, now = self.events(), time.monotonic()
        self._connected |= bool(events & zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if self._connected:
            if events & zmq.EVENT_DISCONNECTED and not self.poll(0):
                self.socket.linger = 0  # nobody receives the unsent messages, so ``close`` must not wait for them
                raise ConnectionError("the connection is closed")
            return
        if events & FAILED or now > self._next_diagnosis:
            self._next_diagnosis = now + HANDSHAKE_SECONDS
            if reason := self.diagnose():
                raise ConnectionError(reason)
        if events & FAILED:
            raise ConnectionError(
                "the two sides do not agree on a key: the same --key-file and --security, or neither, must be on both"
            )
        if now > self._meets_until:
            raise ConnectionError("nobody answers there")


class ZmqListener(ZmqSocket):
    """Listens for peers. An R-worker serves one S-worker at a time; an S-worker receives JOINs of R-workers.

    The listener answers heartbeats. If a peer is silent for the timeout that its heartbeats name, the connection ends.
    While one peer is served, ``on_stranger`` is called for every other peer that sends a message.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes | None,
        role: str = R_WORKER,
        part_bytes: int = FRAME_LIMIT,
        received: int = MAX_QUEUED,
    ) -> None:
        """Bind to ``host`` (a numeric address or "*"); port 0 chooses one. Raise OSError if listening fails.

        ``role``: this side's role; only peers of the other role are accepted. ``part_bytes`` and ``received``: see
        ``ZmqSocket``.
        """
        self.is_guarded, self._told = secret is not None, 0
        super().__init__(zmq.ROUTER, part_bytes, received)
        self.on_stranger: Callable[[PeerChannel], None] = lambda peer: None
        self._authenticator: Any = None
        self.socket.router_mandatory = 1
        try:
            if secret is not None:
                self._authenticate(secret, role)
            self.socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen on tcp://{host}:{port}: {error.strerror}") from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def accept(self, timeout_seconds: float) -> PeerChannel | None:
        """Return the channel to the sender of the first message; None if no message came in time."""
        if not self.poll(timeout_seconds):
            self.look_at_connections()
            return None
        return self.next_peer()

    def next_peer(self) -> PeerChannel | None:
        """Return a channel to the sender of the next message, or None; its ``receive`` begins with that message."""
        try:
            identity = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        first = self.socket.recv(zmq.NOBLOCK, copy=False) if self.more else None
        return PeerChannel(self, identity, first.bytes if first and len(first) == HEADER.size else b"")

    def send_to(self, identity: bytes, parts: Sequence[Any], waits: bool) -> None:
        """Send one message to the peer with ``identity``. Raise ConnectionError if the peer is gone.

        ``waits``: wait for space in a full queue to the peer, and raise ConnectionError if the queue stays full.
        Otherwise a full queue drops the message.
        """
        try:
            self.send_message([identity, *parts], 0 if waits else zmq.NOBLOCK)
        except zmq.Again:
            if waits:
                raise ConnectionError("the peer reads no more messages") from None
        except zmq.ZMQError as error:
            raise ConnectionError(error.strerror) from None

    def reaches(self, identity: bytes) -> bool:
        """Return whether the peer ``identity`` is connected: send an empty message, which the peer ignores."""
        try:
            self.send_to(identity, [b""], waits=False)
        except ConnectionError:
            return False
        return True

    def look_at_connections(self) -> bool:
        """Return whether a connection has ended since the last call.

        The listener logs once if a peer without the key, or with another security level, may have tried to connect.
        """
        events = self.events()
        new = events & FAILED & ~self._told
        self._told |= new
        if new & UNLIKE:
            self._told |= UNLIKE
            log.warning("refused: a peer that does not hold this R-worker's key, or has another --security")
        elif new:
            log.info(
                "a connection ended before its handshake: its peer has another --security or key, only tested whether "
                "this port is open, or left at once"
            )
        return bool(events & zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        """Close the socket; may be called twice."""
        if self._authenticator:
            self._authenticator.stop()
            self._authenticator = None
        super().close()

    def _authenticate(self, secret: bytes, role: str) -> None:
        """Make the socket accept only peers with the other role's key. A peer must also know this role's key."""
        accepted = use_curve(self.socket, secret, role)
        self.socket.curve_server = True
        zap_domain = "fastdecode"
        self.socket.zap_domain = zap_domain.encode()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self.context)
        self._authenticator.start()
        callback = SimpleNamespace(callback=lambda domain, key: key == accepted)
        self._authenticator.configure_curve_callback(zap_domain, callback)
