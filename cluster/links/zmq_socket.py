"""A ZeroMQ socket of either end: its limits, its keys, its heartbeats, and reading a message part by part."""

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
"""How long an R-worker waits for an S-worker that sends no heartbeat: it serves no other S-worker meanwhile."""

MAX_QUEUED = 256
"""Messages to one peer, or from one to a listener, that may wait, most of them parts of a few hundred KiB. What comes
to a connecting side is an answer: without a limit its queue is as long as what it has asked for."""

UNLIKE = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""The two ends do not agree on a key. A connection that ends before may be a probe of the port."""

FAILED = UNLIKE | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class ZmqSocket:
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
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED
        self._monitor: Any = self.socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def poll(self, timeout_seconds: float) -> bool:
        """Return True if a message is there; returns early for a connection's event."""
        return self.socket in dict(self._poller.poll(math.ceil(timeout_seconds * 1000)))

    def events(self) -> int:
        """Return the connections' events since the last call, or-ed together."""
        found = 0
        while self._monitor.poll(0):
            found |= zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        return found

    def read_into(self, buffer: Any) -> None:
        wanted = memoryview(buffer).nbytes
        if not self.more or (got := self.socket.recv_into(buffer)) != wanted:
            raise FrameError(f"a frame whose part has {got if self.more else 'no'} bytes, not {wanted}")

    def read_part(self, num_bytes: int) -> memoryview:
        """Return the message's next part where it was received, read-only.

        Raise FrameError unless it has that length.
        """
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
        send_heartbeats(socket, PATIENCE_SECONDS, patience_seconds)
        if secret is not None:
            socket.curve_serverkey = use_curve(socket, secret, S_WORKER)
        socket.connect(f"tcp://{address}")

    def close(self) -> None:
        """May be called twice."""
        self._context.destroy()


def beats_name(epoch: int) -> bytes:
    """Under which a session's ``Beats`` are known to its R-worker's socket."""
    return b"beats " + epoch.to_bytes(8, "little")


def send_heartbeats(socket: zmq.Socket, silence_seconds: float, patience_seconds: float) -> None:
    """The connection ends after ``silence_seconds`` without a sign of the other end; there, after
    ``patience_seconds`` without one of this end."""
    # A peer that falls silent is noticed up to so much later than its limit: that counts from the next heartbeat
    heartbeat_seconds = 0.1
    socket.heartbeat_ivl = int(heartbeat_seconds * 1000)
    socket.heartbeat_timeout = int(silence_seconds * 1000)
    socket.heartbeat_ttl = int(patience_seconds * 1000)


def use_curve(socket: zmq.Socket, secret: bytes, role: str) -> bytes:
    """Give ``socket`` the key pair of ``role``; returns the public key of the other role, in Z85."""
    if not zmq.has("curve"):
        raise BackendError("this build of libzmq has no CURVE, and a key file needs it: install pyzmq from its wheel")
    other = R_WORKER if role == S_WORKER else S_WORKER
    mine, theirs = (zmq.utils.z85.encode(derive_key(secret, each)) for each in (role, other))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(mine), mine
    return zmq.curve_public(theirs)
