"""An R-worker that listens: serves one S-worker after another, and answers others meanwhile."""

from __future__ import annotations

import logging
from functools import partial

from fastdecode.cluster.links.link import TICK_SECONDS, Link
from fastdecode.cluster.links.peer import MOST_LOGGED, PeerChannel
from fastdecode.cluster.links.zeromq import ZmqListener
from fastdecode.cluster.links.zmq_socket import beats_name
from fastdecode.cluster.r_worker.host import Host
from fastdecode.cluster.r_worker.joiner import Joiner
from fastdecode.cluster.r_worker.lease import Lease
from fastdecode.cluster.r_worker.session import Session
from fastdecode.cluster.r_worker.vitals import Vitals
from fastdecode.cluster.wire.frames import Conversation, Kind, decode
from fastdecode.cluster.wire.handshake import BOTH_SIDES, MOST_PENDING, Gate, Security
from fastdecode.cluster.wire.messages import MAX_HELLO_BYTES, Hello, decode_hello, encode_refusal
from fastdecode.core.errors import FrameError

log = logging.getLogger("fastdecode.r_worker")


class Server:
    """The R-worker's loop: serves one S-worker after another, and frees or keeps each one's cache.

    ``joiner``: sends JOIN while no S-worker is served. ``security``: with a proof key, an S-worker must prove to hold
    it before its HELLO. ``listens_at``: the host of ``listener``, at which a KV port listens too. ``vitals``: see
    ``Session``.
    """

    def __init__(
        self,
        listener: ZmqListener,
        host: Host,
        joiner: Joiner | None = None,
        security: Security | None = None,
        listens_at: str = "127.0.0.1",
        vitals: Vitals | None = None,
    ) -> None:
        self._vitals = vitals or Vitals()
        self._listener, self._host, self._joiner = listener, host, joiner
        self._security, self._listens_at = security or Security(), listens_at
        self._door = _Door(self._security)
        self._session: Session | None = None
        self._lease = Lease()
        self._is_leaving = False
        self._serving = ""
        self._logged: set[str] = set()
        listener.on_stranger = self._refuse_stranger

    def run(self) -> None:
        """Serve until this R-worker was asked to leave and its S-worker has dismissed it."""
        while not self._is_leaving:
            self._vitals.turn()
            self._lease.expire()
            if self._joiner:
                self._joiner.ask()
                self._vitals.trouble = self._joiner.trouble
            channel = self._listener.accept(TICK_SECONDS)
            if channel is None:
                continue
            if self._admits(channel):
                self._serve(channel)
            channel.close()

    def leave(self) -> bool:
        """Ask the S-worker to move its sequences away, and end afterwards.

        Return False if the caller should end at once: no S-worker is served, or this was called before.
        """
        if self._session is None or self._is_leaving:
            return False
        self._is_leaving = self._session.leaving = self._vitals.is_leaving = True
        return True

    def _serve(self, channel: PeerChannel) -> None:
        on_open = partial(self._on_open, channel)
        self._session = Session(
            Link(channel), self._host, on_open, self._security, self._listens_at, self._vitals, self._lease
        )
        self._session.run()
        self._session = None
        log.info("free")

    def _admits(self, peer: PeerChannel) -> bool:
        """Return whether ``peer`` may open a session.

        The message of a peer without a proof is read here, and must be a proof.
        """
        if self._door.knows(peer):
            return _kind(peer) is not Kind.BYE  # BYE comes from refused peers, and from peers whose session is over
        if self._door.has_gate:
            return self._door.opens(peer)
        self._log_once("a peer that asks for proof of a key, and this R-worker has none")
        _refuse(peer, "key", f"this R-worker has no key: {BOTH_SIDES}")
        return False

    def _on_open(self, channel: PeerChannel, hello: Hello) -> None:
        channel.waits = True
        self._serving = hello.name
        self._logged.clear()
        log.info("serving %s", hello.name)

    def _refuse_stranger(self, peer: PeerChannel) -> None:
        """Refuse an S-worker that asks while another is served. Drop other frames of unknown peers, and log them once.

        In a named session, a silent S-worker loses the session, so the asking one is admitted at its next attempt.
        """
        if self._door.has_gate and not self._door.knows(peer):
            self._door.opens(peer)
            return
        if (kind := _kind(peer)) is Kind.BYE:
            return  # a peer that was refused ends with BYE
        if kind is not Kind.HELLO:
            self._log_once("a frame of a peer that is not served")
            return
        hello = _hello(peer)
        if hello and (reason := self._lease.superseded(hello.lease)):
            self._log_once(reason)
            _refuse(peer, "superseded", reason)
            return
        self._tell_of(hello)
        if self._session and hello and self._lease.may_pass_to(hello, self._has_stopped):
            self._session.give_way(hello.name)
        _refuse(peer, "busy", f"this R-worker serves another S-worker, {self._serving}")

    def _has_stopped(self) -> bool:
        """Return whether the served S-worker has stopped sending heartbeats."""
        return not self._listener.reaches(beats_name(self._session.epoch if self._session else 0))

    def _tell_of(self, hello: Hello | None) -> None:
        """Log once that the S-worker of ``hello`` asks to be served, since a standby asks repeatedly."""
        if hello and hello.lease and hello.lease.waits:
            self._log_once(f"S-worker {hello.name} stands by for session {hello.lease.session}", logging.INFO, "")
        else:
            self._log_once(f"a second S-worker, {hello.name}" if hello else "a second S-worker")

    def _log_once(self, what: str, level: int = logging.WARNING, before: str = "refused: ") -> None:
        """Log a message once per served S-worker."""
        if what not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(what)
            log.log(level, "%s%s", before, what)


class _Door:
    """Remembers the last ``MOST_PENDING`` peers that have proven to hold the key. Without a key all peers may enter."""

    def __init__(self, security: Security) -> None:
        self._gate = None if security.proof_key is None else Gate(security.proof_key)
        self._proven: dict[bytes, None] = {}

    @property
    def has_gate(self) -> bool:
        """True if a proof is needed."""
        return self._gate is not None

    def knows(self, peer: PeerChannel) -> bool:
        """Return whether ``peer`` may send frames: the peer has proven to hold the key, or there is no key."""
        return _kind(peer) is not Kind.CHALLENGE if self._gate is None else peer.identity in self._proven

    def opens(self, peer: PeerChannel) -> bool:
        """Read the message of ``peer``; confirm it and return True if it is a good proof."""
        if self._gate is None or not self._gate.admits(peer, peer.identity):
            return False
        while len(self._proven) >= MOST_PENDING:
            self._proven.pop(next(iter(self._proven)))
        self._proven[peer.identity] = None
        return _send(peer, Kind.PROVEN)


def _send(peer: PeerChannel, kind: Kind, *parts: bytes) -> bool:
    """Send a frame; return False if ``peer`` has gone."""
    try:
        Conversation(peer).send(kind, *parts)
    except ConnectionError:
        return False
    return True


def _refuse(peer: PeerChannel, error: str, message: str) -> None:
    _send(peer, Kind.REFUSED, encode_refusal(error, message))


def _hello(peer: PeerChannel) -> Hello | None:
    """Return the HELLO that ``peer`` has sent; None if its message is no HELLO, or malformed."""
    talk = Conversation(peer)
    try:
        frame = talk.receive(0.0)
        return decode_hello(talk.body(frame, MAX_HELLO_BYTES)) if frame and frame.kind is Kind.HELLO else None
    except FrameError:
        return None


def _kind(peer: PeerChannel) -> Kind | None:
    """Return the kind of the first frame of ``peer``; None if its first message is no frame."""
    try:
        return decode(peer.first_header or b"").kind
    except FrameError:
        return None
