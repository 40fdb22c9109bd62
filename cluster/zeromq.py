"""Channels over ZeroMQ and TCP: the only file that knows either.

An R-worker's listener is a ROUTER socket, an S-worker's channel a DEALER. libzmq frames, queues and authenticates; what
crosses is checked by ``frames.py``. With a secret, both ends prove that they hold it by CURVE keys derived from it, and
everything is encrypted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from fastdecode.cluster.frames import FRAME_LIMIT, HEADER
from fastdecode.cluster.keys import derive_key
from fastdecode.errors import BackendError, FrameError

SILENCE_SECONDS = 1.5
"""An R-worker that answers no heartbeat for so long is lost; one whose process ends is noticed at once."""

PATIENCE_SECONDS = 30.0
"""How long an R-worker waits for an S-worker that answers none: nobody else needs it meanwhile."""

HEARTBEAT_SECONDS = 0.3
MAX_QUEUED = 256
"""Messages each way that wait for the other side, most of them parts of a few hundred KiB."""

DEPARTURE_SECONDS = 2.0
"""How long after any connection's end the listener asks whether it was the served one's."""

S_WORKER, R_WORKER = "s-worker", "r-worker"
"""The two sides of every connection, each with a key of its own."""

_OTHER_ROLE = {S_WORKER: R_WORKER, R_WORKER: S_WORKER}
_ZAP_DOMAIN = "fastdecode"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

log = logging.getLogger("fastdecode.r_worker")


class _Socket:
    """What both ends share: limits, heartbeats, a monitor of the connections, and reading a message part by part."""

    def __init__(self, kind: int, silence_seconds: float) -> None:
        """``kind``: ZeroMQ's; a peer that answers no heartbeat for ``silence_seconds`` is disconnected."""
        self.context = zmq.Context()
        self.socket: zmq.Socket = self.context.socket(kind)
        for option, value in (
            (zmq.MAXMSGSIZE, FRAME_LIMIT),
            (zmq.SNDHWM, MAX_QUEUED),
            (zmq.RCVHWM, MAX_QUEUED),
            (zmq.LINGER, 200),
            (zmq.SNDTIMEO, int(PATIENCE_SECONDS * 1000)),
            (zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(silence_seconds * 1000)),
        ):
            self.socket.setsockopt(option, value)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        self._monitor: Any = self.socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def poll(self, timeout_seconds: float) -> bool:
        """True when a message is there; returns early for news of a connection."""
        return self.socket in dict(self._poller.poll(math.ceil(timeout_seconds * 1000)))

    def events(self) -> int:
        """The connections' news since the last call, or-ed together."""
        found = 0
        while self._monitor.poll(0):
            found |= zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        return found

    def part(self) -> bytes:
        """The next part of the message at hand, if it can be a header; b"" for anything else."""
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        return frame.bytes if len(frame) == HEADER.size else b""

    def read_into(self, buffer: Any) -> None:
        """See ``Channel.read_into``."""
        wanted = memoryview(buffer).nbytes
        if not self.more or (got := self.socket.recv_into(buffer)) != wanted:
            raise FrameError(f"a frame whose part has {got if self.more else 'no'} bytes, not {wanted}")

    def skip(self) -> None:
        """Drop what is left of the message at hand."""
        while self.more:
            self.socket.recv_into(bytearray())

    @property
    def more(self) -> bool:
        """True while the message at hand has parts to read."""
        return bool(self.socket.getsockopt(zmq.RCVMORE))

    def send(self, parts: Sequence[Any], flags: int = 0) -> None:
        """One message; large parts are not copied. Where Ctrl-C cuts it short it is ended: the next is whole again."""
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


class ZmqChannel:
    """``Channel`` of an S-worker to the R-worker at ``address`` ("host:port"), or the other way round."""

    def __init__(self, address: str, secret: bytes | None, role: str = S_WORKER) -> None:
        """``role``: this side's."""
        self._socket = _Socket(zmq.DEALER, SILENCE_SECONDS)
        self._address = address
        self._connected = False
        if secret is not None:
            _use_curve(self._socket.socket, secret, role)
            self._socket.socket.curve_serverkey = _keys(secret, _OTHER_ROLE[role])[0]
        self.read_into, self.close = self._socket.read_into, self._socket.close
        try:
            self._socket.socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise BackendError(f"R-worker {address}: {error.strerror}") from None

    def send(self, parts: Sequence[Any]) -> None:
        """See ``Channel.send``."""
        try:
            self._socket.send(parts)
        except zmq.Again:
            raise ConnectionError("it takes no more messages") from None

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. An empty message only asks whether anybody listens."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._socket.skip()
            try:
                if header := self._socket.socket.recv(zmq.NOBLOCK):
                    return header
                continue
            except zmq.Again:
                pass
            left = deadline - time.monotonic()
            if timeout_seconds == 0 or left <= 0:
                return None
            if not self._socket.poll(left):
                self._look_at_connection()

    def _look_at_connection(self) -> None:
        events = self._socket.events()
        self._connected = self._connected or bool(events & zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if not self._connected and events & _FAILED:
            raise ConnectionError(
                "the two sides do not agree on a key: the same --key-file and --security, or neither, must be on both"
            )
        if self._connected and events & zmq.EVENT_DISCONNECTED and not self._socket.poll(0):
            raise ConnectionError("the connection is closed")


class ZmqListener:
    """Where an R-worker waits for S-workers, of which it serves one at a time; or an S-worker for those who would join.

    ``on_stranger`` is called with whoever else speaks while one is served, and with the header of what it said.
    """

    def __init__(self, host: str, port: int, secret: bytes | None, role: str = R_WORKER) -> None:
        """Bind to ``host`` (a numeric address or "*"); port 0 chooses one. OSError where that is impossible.

        ``role``: this side's; only the other one is let in.
        """
        self.is_guarded = secret is not None
        self.socket = _Socket(zmq.ROUTER, PATIENCE_SECONDS)
        self.on_stranger: Callable[[PeerChannel], None] = lambda peer: None
        self._authenticator: Any = None
        self._logged = False
        self.socket.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if secret is not None:
                self._authenticate(secret, role)
            self.socket.socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen on tcp://{host}:{port}: {error.strerror}") from None
        self.address = self.socket.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def accept(self, timeout_seconds: float) -> PeerChannel | None:
        """The channel to whoever spoke first, None when nobody did in time."""
        if not self.socket.poll(timeout_seconds):
            self.log_failures(self.socket.events())
            return None
        return self.next_peer()

    def next_peer(self) -> PeerChannel:
        """The channel to the sender of the next message, which must be there: that is what it receives first."""
        identity = self.socket.socket.recv(zmq.NOBLOCK)
        return PeerChannel(self, identity, self.socket.part() if self.socket.more else b"")

    def log_failures(self, events: int) -> None:
        """Say once that somebody without the key, or with it used otherwise, knocked."""
        if events & _FAILED and not self._logged:
            self._logged = True
            log.warning("refused: a peer that does not hold this R-worker's key, or has another --security")

    def close(self) -> None:
        """May be called twice."""
        if self._authenticator:
            self._authenticator.stop()
            self._authenticator = None
        self.socket.close()

    def _authenticate(self, secret: bytes, role: str) -> None:
        """Serve only who holds the other role's key; who does not know this one's cannot even ask."""
        _use_curve(self.socket.socket, secret, role)
        self.socket.socket.curve_server = True
        self.socket.socket.zap_domain = _ZAP_DOMAIN.encode()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self.socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, _OneClient(_keys(secret, _OTHER_ROLE[role])[0]))


class PeerChannel:
    """``Channel`` of an R-worker to one S-worker; others who speak meanwhile are refused.

    Until ``waits`` is set, what does not fit into the queue to this peer is dropped: nobody who is not served, and does
    not read what it is told, holds up who is.
    """

    def __init__(self, listener: ZmqListener, identity: bytes, first_header: bytes | None = None) -> None:
        self._listener, self._socket = listener, listener.socket
        self.identity, self.first_header = identity, first_header
        self._probe_until = 0.0
        self.waits = False
        self.read_into = self._socket.read_into

    def send(self, parts: Sequence[Any]) -> None:
        """See ``Channel.send``."""
        try:
            self._socket.send([self.identity, *parts], 0 if self.waits else zmq.NOBLOCK)
        except zmq.Again:
            if self.waits:
                raise ConnectionError("it takes no more messages") from None
        except zmq.ZMQError as error:
            raise ConnectionError(error.strerror) from None

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``."""
        if self.first_header is not None:
            first, self.first_header = self.first_header, None
            return first
        self._socket.skip()
        while True:
            try:
                peer = self._listener.next_peer()
            except zmq.Again:
                if timeout_seconds == 0:
                    return None
                if not self._socket.poll(timeout_seconds):
                    self._look_at_connection()
                    return None
                continue
            if peer.identity == self.identity:
                return peer.first_header
            self._listener.on_stranger(peer)
            self._socket.skip()

    def close(self) -> None:
        """See ``Channel.close``; the listener goes on."""
        self._socket.skip()

    def _look_at_connection(self) -> None:
        """After some connection has ended, ask the served peer's whether it is still there; ConnectionError if not."""
        events, now = self._socket.events(), time.monotonic()
        self._listener.log_failures(events)
        if events & zmq.EVENT_DISCONNECTED:
            self._probe_until = now + DEPARTURE_SECONDS
        if now < self._probe_until:
            self.send([b""])


class _OneClient:
    """What the authenticator asks: is this public key the one that is served?"""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """``key``: the client's, in Z85."""
        return key == self._public_key


def _keys(secret: bytes, role: str) -> tuple[bytes, bytes]:
    """Public and private key of ``role`` in Z85."""
    private = zmq.utils.z85.encode(derive_key(secret, role))
    return zmq.curve_public(private), private


def _use_curve(socket: zmq.Socket, secret: bytes, role: str) -> None:
    if not zmq.has("curve"):
        raise BackendError("this build of libzmq has no CURVE, and a key file needs it: install pyzmq from its wheel")
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, role)
