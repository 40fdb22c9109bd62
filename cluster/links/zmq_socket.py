"""The ZeroMQ socket of both ends: its limits, keys and heartbeats, and reading a message part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from fastdecode.cluster.wire.handshake import R_WORKER, S_WORKER, derive_key
from fastdecode.core.errors import BackendError, FrameError

PATIENCE_SECONDS = 30.0
"""Seconds without heartbeats after which an R-worker drops its S-worker and may serve another one."""

MAX_QUEUED = 256
"""Most queued messages to one peer, or from one peer to a listener. Most messages are a few hundred KiB.

The connecting side receives only answers. So its receive queue needs no limit: it has at most one message per request.
"""

UNLIKE = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Connection events that show that the ends do not agree on a key. A port probe ends before such an event."""

FAILED = UNLIKE | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Context(zmq.Context):
    """A context that keeps its sockets alive until it is destroyed.

    pyzmq's context only has weak references to its sockets. If the garbage collector frees both at once, that context
    finds no socket to close, and waits for the sockets forever.
    """

    def _add_socket(self, socket: Any) -> None:
        self._sockets = getattr(self, "_sockets", None) or set()  # type: ignore[assignment]
        self._sockets.add(socket)


class ZmqSocket:
    """The base of both ends' sockets: limits, a monitor of connections, and reading a message part by part.

    libzmq 4.3.5 stops reading from a peer whose queue is full. It aborts the process (an assertion in ``out_event``) if
    that peer ends and the next heartbeat is due. So a socket either sends no heartbeats itself, or its queue has no
    limit.
    """

    def __init__(self, kind: int, part_bytes: int, received: int) -> None:
        """``kind``: ZeroMQ's socket type.

        ``part_bytes``: most bytes of a part. ``received``: most messages queued from one peer; 0 for no limit.
        """
        self.context = Context()
        self.socket: zmq.Socket = self.context.socket(kind)
        self.socket.maxmsgsize, self.socket.linger = part_bytes, 200
        self.socket.sndhwm, self.socket.rcvhwm = MAX_QUEUED, received
        self.socket.sndtimeo = int(PATIENCE_SECONDS * 1000)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED
        self._monitor: Any = self.socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def poll(self, timeout_seconds: float) -> bool:
        """Wait for a message; return whether one is there. Connection events end the wait early."""
        return self.socket in dict(self._poller.poll(math.ceil(timeout_seconds * 1000)))

    def events(self) -> int:
        """Return the connection events since the last call, combined by OR."""
        found = 0
        while self._monitor.poll(0):
            found |= zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        return found

    def read_into(self, buffer: Any) -> None:
        wanted = memoryview(buffer).nbytes
        if not self.more or (got := self.socket.recv_into(buffer)) != wanted:
            raise FrameError(f"a frame whose part has {got if self.more else 'no'} bytes, not {wanted}")

    def read_part(self, num_bytes: int) -> memoryview:
        """Return the message's next part in place, read-only.

        Raise FrameError unless the part has ``num_bytes`` bytes.
        """
        part = self.socket.recv(copy=False).buffer if self.more else memoryview(b"")
        if part.nbytes != num_bytes:
            raise FrameError(f"a frame whose part has {part.nbytes} bytes, not {num_bytes}")
        return part

    def watch(self, descriptor: int) -> None:
        """Let ``poll`` return early when ``descriptor`` is readable."""
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
        """Send ``parts`` as one message; large parts are not copied.

        If Ctrl-C interrupts the sending, the message is ended early, so that the next message is whole.
        """
        try:
            for part in parts[:-1]:
                self.socket.send(part, zmq.SNDMORE | flags, copy=False)
            self.socket.send(parts[-1], flags, copy=False)
        except KeyboardInterrupt:
            self.socket.send(b"")
            raise

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.context.destroy()


class Beats:
    """A second connection to an R-worker, only for heartbeats, under a name that the R-worker knows.

    libzmq counts any message as a sign of life. The timeout that a heartbeat starts ends with the next message. So on a
    connection with other messages, a process that stops right after sending one would never be noticed.
    """

    def __init__(self, address: str, secret: bytes | None, epoch: int, patience_seconds: float) -> None:
        """``epoch``: the epoch of the session.

        The R-worker ends the session if this process is stopped for ``patience_seconds``.
        """
        self._context = Context()
        socket = self._context.socket(zmq.DEALER)
        self._socket = socket  # pyzmq closes the socket once nothing refers to it
        socket.routing_id, socket.conflate, socket.linger = beats_name(epoch), 1, 0
        send_heartbeats(socket, PATIENCE_SECONDS, patience_seconds)
        if secret is not None:
            socket.curve_serverkey = use_curve(socket, secret, S_WORKER)
        socket.connect(f"tcp://{address}")

    def close(self) -> None:
        self._context.destroy()


def beats_name(epoch: int) -> bytes:
    """Return the ZeroMQ identity that the heartbeat connection of the session ``epoch`` uses (``Beats``)."""
    return b"beats " + epoch.to_bytes(8, "little")


def send_heartbeats(socket: zmq.Socket, silence_seconds: float, patience_seconds: float) -> None:
    """Send heartbeats on ``socket``.

    This end closes the connection after ``silence_seconds`` without a sign of life, the other end after
    ``patience_seconds``.
    """
    # Seconds between heartbeats. ``silence_seconds`` run from the first unanswered heartbeat, so a silent peer may be
    # noticed this much later.
    heartbeat_seconds = 0.1
    socket.heartbeat_ivl = int(heartbeat_seconds * 1000)
    socket.heartbeat_timeout = int(silence_seconds * 1000)
    socket.heartbeat_ttl = int(patience_seconds * 1000)


def use_curve(socket: zmq.Socket, secret: bytes, role: str) -> bytes:
    """Give ``socket`` the CURVE key pair of ``role``; return the public key of the other role, in Z85 text."""
    if not zmq.has("curve"):
        raise BackendError("this build of libzmq has no CURVE, and a key file needs it: install pyzmq from its wheel")
    other = R_WORKER if role == S_WORKER else S_WORKER
    mine, theirs = (zmq.utils.z85.encode(derive_key(secret, each)) for each in (role, other))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(mine), mine
    return zmq.curve_public(theirs)
