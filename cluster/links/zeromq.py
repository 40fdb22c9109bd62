"""Channels over ZeroMQ and TCP: the only file that imports zmq.

An R-worker's listener is a ROUTER socket, an S-worker's channel a DEALER. libzmq frames and queues; ``wire/frames.py``
checks what arrives. With a secret, libzmq authenticates both ends by CURVE keys derived from it, and encrypts all data.
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
from fastdecode.cluster.wire.frames import FRAME_LIMIT, HEADER
from fastdecode.cluster.wire.handshake import R_WORKER, S_WORKER, derive_key
from fastdecode.core.errors import BackendError, FrameError

PATIENCE_SECONDS = 30.0
"""How long an R-worker waits for an S-worker that sends no heartbeat: it serves no other S-worker meanwhile."""

HEARTBEAT_SECONDS = 0.1
"""A peer that falls silent is noticed up to so much later than its limit: that counts from the next heartbeat."""

MAX_QUEUED = 256
"""Messages to one peer, or from one to a listener, that may wait, most of them parts of a few hundred KiB. What comes
to a connecting side is an answer: without a limit its queue is as long as what it has asked for."""

RETRY_SECONDS = 0.02  # between two attempts to send to a full queue

HANDSHAKE_SECONDS = 2.0
"""A ZeroMQ handshake takes milliseconds; where it takes longer, the other end may be no ZeroMQ socket at all."""

_ZAP_DOMAIN = "fastdecode"
_UNLIKE = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""The two ends do not agree on a key. A connection that ends before may be a probe of the port."""
_FAILED = _UNLIKE | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

log = logging.getLogger("fastdecode.r_worker")


class _Socket:
    """Common to both ends: limits, a monitor of connections, and reading a message part by part.

    libzmq 4.3.5 stops reading from a peer whose queue is full, and aborts the process where that peer ends and the next
    heartbeat is due (an assertion in its ``out_event``). So a socket either sends no heartbeats by itself, or
    its queue has no limit.
    """

    def __init__(self, kind: int, part_bytes: int, received: int) -> None:
        """``kind``: ZeroMQ's. ``part_bytes``: most of a part. ``received``: queued messages of a peer, 0: no limit."""
        self.context = zmq.Context()
        self.socket: zmq.Socket = self.context.socket(kind)
        self.socket.maxmsgsize, self.socket.linger = part_bytes, 200
        self.socket.sndhwm, self.socket.rcvhwm = MAX_QUEUED, received
        self.socket.sndtimeo = int(PATIENCE_SECONDS * 1000)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        self._monitor: Any = self.socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def poll(self, timeout_seconds: float) -> bool:
        """True when a message is there; returns early for a connection's event."""
        return self.socket in dict(self._poller.poll(math.ceil(timeout_seconds * 1000)))

    def events(self) -> int:
        """The connections' events since the last call, or-ed together."""
        found = 0
        while self._monitor.poll(0):
            found |= zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        return found

    def read_into(self, buffer: Any) -> None:
        wanted = memoryview(buffer).nbytes
        if not self.more or (got := self.socket.recv_into(buffer)) != wanted:
            raise FrameError(f"a frame whose part has {got if self.more else 'no'} bytes, not {wanted}")

    def read_part(self, num_bytes: int) -> memoryview:
        """The message's next part where it was received, read-only; FrameError unless it has that length."""
        part = self.socket.recv(copy=False).buffer if self.more else memoryview(b"")
        if part.nbytes != num_bytes:
            raise FrameError(f"a frame whose part has {part.nbytes} bytes, not {num_bytes}")
        return part

    def watch(self, descriptor: int) -> None:
        """Let ``poll`` return early once there is something to read at ``descriptor``."""
        self._poller.register(descriptor, zmq.POLLIN)

    def skip(self) -> None:
        """Drop the unread parts of the current message."""
        while self.more:
            self.socket.recv_into(bytearray())

    @property
    def more(self) -> bool:
        """True while the current message has unread parts."""
        return bool(self.socket.getsockopt(zmq.RCVMORE))

    def send_message(self, parts: Sequence[Any], flags: int = 0) -> None:
        """Send one message, large parts without a copy. One that Ctrl-C cuts short is ended: the next is whole."""
        try:
            for part in parts[:-1]:
                self.socket.send(part, zmq.SNDMORE | flags, copy=False)
            self.socket.send(parts[-1], flags, copy=False)
        except KeyboardInterrupt:
            self.socket.send(b"")
            raise

    def close(self) -> None:
        """May be called twice."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.context.destroy()


class ZmqChannel(_Socket):
    """``Channel`` of an S-worker to the R-worker at ``address`` ("host:port"), or the other way round.

    ``diagnose`` is called while no handshake succeeds, and returns the reason, or "" where it knows none.
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
        """``role``: this side's. The connection ends where nothing is heard for ``silence_seconds``, and there where
        nothing is heard of this side for ``patience_seconds``. It fails where no handshake succeeds within
        ``meeting_seconds``."""
        super().__init__(zmq.DEALER, FRAME_LIMIT, 0)
        _send_heartbeats(self.socket, silence_seconds, patience_seconds)
        self.diagnose: Callable[[], str] = lambda: ""
        self._next_diagnosis = time.monotonic() + HANDSHAKE_SECONDS
        self._connected, self._meets_until = False, time.monotonic() + meeting_seconds
        if secret is not None:
            self.socket.curve_serverkey = _use_curve(self.socket, secret, role)
        try:
            self.socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise BackendError(f"R-worker {address}: {error.strerror}") from None

    def send(self, parts: Sequence[Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self.send_message(parts, zmq.NOBLOCK)
                return
            except zmq.Again:  # the queue is full, or there is none since the other side has refused us
                self.look_at_connection()
            if time.monotonic() > deadline:
                raise ConnectionError("it takes no more messages")
            self.poll(RETRY_SECONDS)

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. An empty message only tests the connection."""
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
        """Why no connection has come about, "" where one has, if only for a while."""
        try:
            self.look_at_connection()
        except ConnectionError as error:
            return "" if self._connected else str(error)
        return "" if self._connected else "nobody answers there"

    def look_at_connection(self) -> None:
        """ConnectionError if it has ended, or cannot be made."""
        events, now = self.events(), time.monotonic()
        self._connected |= bool(events & zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if self._connected:
            if events & zmq.EVENT_DISCONNECTED and not self.poll(0):
                self.socket.linger = 0  # what could not be sent has nowhere to go: closing need not wait
                raise ConnectionError("the connection is closed")
            return
        if events & _FAILED or now > self._next_diagnosis:
            self._next_diagnosis = now + HANDSHAKE_SECONDS
            if reason := self.diagnose():
                raise ConnectionError(reason)
        if events & _FAILED:
            raise ConnectionError(
                "the two sides do not agree on a key: the same --key-file and --security, or neither, must be on both"
            )
        if now > self._meets_until:
            raise ConnectionError("nobody answers there")


class Beats:
    """A second connection to an R-worker, which carries heartbeats alone, under a name that the R-worker knows.

    libzmq counts any message as a sign of life, and the time that a heartbeat names only runs from one to the next
    message: of a process that is stopped right after it has sent something the other end never notices.
    """

    def __init__(self, address: str, secret: bytes | None, epoch: int, patience_seconds: float) -> None:
        """``epoch``: of the session there. It ends there where this process is stopped for ``patience_seconds``."""
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        self._socket = socket  # which pyzmq closes once nothing refers to it
        socket.routing_id, socket.conflate, socket.linger = beats_name(epoch), 1, 0
        _send_heartbeats(socket, PATIENCE_SECONDS, patience_seconds)
        if secret is not None:
            socket.curve_serverkey = _use_curve(socket, secret, S_WORKER)
        socket.connect(f"tcp://{address}")

    def close(self) -> None:
        """May be called twice."""
        self._context.destroy()


def beats_name(epoch: int) -> bytes:
    """Under which a session's ``Beats`` are known to its R-worker's socket."""
    return b"beats " + epoch.to_bytes(8, "little")


class ZmqListener(_Socket):
    """The socket at which an R-worker accepts S-workers, one at a time, or an S-worker the JOINs of R-workers.

    It answers heartbeats; one that has had some and gets no more ends the connection after the time that they name.
    While one peer is served, ``on_stranger`` is called with every other peer that sends a message.
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
        """Bind to ``host`` (a numeric address or "*"); port 0 chooses one. OSError where that is impossible.

        ``role``: this side's; only peers of the other role are accepted. ``part_bytes``, ``received``: see ``_Socket``.
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
        """The channel to the sender of the first message, None when none came in time."""
        if not self.poll(timeout_seconds):
            self.look_at_connections()
            return None
        return self.next_peer()

    def next_peer(self) -> PeerChannel | None:
        """The channel to the sender of the next message, which is the first that it receives; None without one."""
        try:
            identity = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        first = self.socket.recv(zmq.NOBLOCK, copy=False) if self.more else None
        return PeerChannel(self, identity, first.bytes if first and len(first) == HEADER.size else b"")

    def send_to(self, identity: bytes, parts: Sequence[Any], waits: bool) -> None:
        """Send one message to the peer with ``identity``; ConnectionError where it is gone.

        One for which there is no room is dropped, unless this ``waits``: then ConnectionError where none comes in time.
        """
        try:
            self.send_message([identity, *parts], 0 if waits else zmq.NOBLOCK)
        except zmq.Again:
            if waits:
                raise ConnectionError("it takes no more messages") from None
        except zmq.ZMQError as error:
            raise ConnectionError(error.strerror) from None

    def reaches(self, identity: bytes) -> bool:
        """Whether the peer of that name is there; it gets an empty message, which says nothing."""
        try:
            self.send_to(identity, [b""], waits=False)
        except ConnectionError:
            return False
        return True

    def look_at_connections(self) -> bool:
        """True where one has ended since the last look. Logs once that a peer without the key, or with another security
        level, has tried to connect, or may have."""
        events = self.events()
        new = events & _FAILED & ~self._told
        self._told |= new
        if new & _UNLIKE:
            self._told |= _UNLIKE
            log.warning("refused: a peer that does not hold this R-worker's key, or has another --security")
        elif new:
            log.info(
                "a connection ended before its handshake: its peer has another --security or key, only looked whether "
                "this port is open, or left at once"
            )
        return bool(events & zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        """May be called twice."""
        if self._authenticator:
            self._authenticator.stop()
            self._authenticator = None
        super().close()

    def _authenticate(self, secret: bytes, role: str) -> None:
        """Accept only holders of the other role's key; a peer that does not know this role's key cannot connect."""
        accepted = _use_curve(self.socket, secret, role)
        self.socket.curve_server = True
        self.socket.zap_domain = _ZAP_DOMAIN.encode()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self.context)
        self._authenticator.start()
        callback = SimpleNamespace(callback=lambda domain, key: key == accepted)
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, callback)


def _send_heartbeats(socket: zmq.Socket, silence_seconds: float, patience_seconds: float) -> None:
    """The connection ends after ``silence_seconds`` without a sign of the other end; there, after
    ``patience_seconds`` without one of this end."""
    socket.heartbeat_ivl = int(HEARTBEAT_SECONDS * 1000)
    socket.heartbeat_timeout = int(silence_seconds * 1000)
    socket.heartbeat_ttl = int(patience_seconds * 1000)


def _use_curve(socket: zmq.Socket, secret: bytes, role: str) -> bytes:
    """Give ``socket`` the key pair of ``role``; returns the public key of the other role, in Z85."""
    if not zmq.has("curve"):
        raise BackendError("this build of libzmq has no CURVE, and a key file needs it: install pyzmq from its wheel")
    other = R_WORKER if role == S_WORKER else S_WORKER
    mine, theirs = (zmq.utils.z85.encode(derive_key(secret, each)) for each in (role, other))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(mine), mine
    return zmq.curve_public(theirs)
