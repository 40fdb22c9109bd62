"""R-workers over TCP, both ends: the S-worker connects, the R-worker serves one S-worker after another."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from fastdecode.api.settings import split_address
from fastdecode.cluster.joining import Joiner, JoinListener
from fastdecode.cluster.links.link import SILENCE_SECONDS, TICK_SECONDS, Link
from fastdecode.cluster.links.peer import MOST_LOGGED, PeerChannel
from fastdecode.cluster.links.zeromq import PATIENCE_SECONDS, Beats, ZmqChannel, ZmqListener, beats_name
from fastdecode.cluster.pool import PoolBackend
from fastdecode.cluster.pool_workers import PoolWorker
from fastdecode.cluster.r_worker.host import Host
from fastdecode.cluster.r_worker.lease import LEASE_SECONDS, Lease
from fastdecode.cluster.r_worker.session import Session
from fastdecode.cluster.r_worker.vitals import Vitals
from fastdecode.cluster.remote import TAKE_SECONDS, RemoteWorker
from fastdecode.cluster.wire.frames import Conversation, Kind, decode
from fastdecode.cluster.wire.handshake import BOTH_SIDES, S_WORKER, Gate, Security, proven, read_security
from fastdecode.cluster.wire.leases import AskedLease
from fastdecode.cluster.wire.messages import MAX_HELLO_BYTES, Hello, decode_hello, encode_refusal
from fastdecode.core.errors import ConfigError, FrameError
from fastdecode.core.layout import KVLayout
from fastdecode.core.types import RWorkerInfo

GREETING_BYTES = 10
SETTLE_SECONDS = LEASE_SECONDS + 0.5
"""From the moment in which one R-worker notices that an S-worker is gone to that in which all have."""

GREETING_SECONDS = 2.0
"""Most time to a ZeroMQ socket's greeting, which needs no Python on the other end."""

log = logging.getLogger("fastdecode.r_worker")


class TcpBackend(PoolBackend):
    """``AttentionBackend`` over R-workers that listen at ``addresses`` ("host:port").

    ``key_file``: the secret of both sides; without it connections are neither authenticated nor encrypted.
    ``security``: "encrypt" (also None) or "authenticate", which leaves the data clear. ``silence_seconds``: after which
    an R-worker is lost; one that listens again later is taken again. ``lease``: what R-workers are asked to keep.
    ``in_order``: they are opened one after another, so that of two that want them the first R-worker's choice has all.
    ``may_miss``: ``open`` goes on without those that are lost, as where they were killed with the engine before.
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
            link = partial(link, patience_seconds=LEASE_SECONDS, beats=True)
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
        for worker in self.workers:  # one that waits has all now, and will not close what it has just opened
            if isinstance(worker, RemoteWorker) and worker.link:
                worker.link.begin_beats()
        return found

    def _may_miss(self, worker: PoolWorker) -> bool:
        """See ``PoolBackend``."""
        return self._misses or super()._may_miss(worker)

    def _anew(self, gone: PoolWorker, is_last: bool) -> Callable[[], RemoteWorker] | None:
        return gone.anew if isinstance(gone, RemoteWorker) and gone.name in self._addresses else None


class JoiningBackend(PoolBackend):
    """``AttentionBackend`` over R-workers that join; ``open`` waits for the first ``count``. It takes a listener."""

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
        """Wait a moment for R-workers to join; raises where no more can come."""
        time.sleep(TICK_SECONDS)


def listen_for_joins(
    address: str,
    block_size: int,
    key_file: str | None = None,
    security: str | None = None,
    silence_seconds: float = SILENCE_SECONDS,
) -> JoinListener:
    """Listen at ``address`` ("host:port") for R-workers that join a pool; ConfigError where that is impossible.

    Messages to this listener are encrypted wherever there is a key; ``security`` is for the links to the R-workers.
    """
    return join_listener(address, block_size, read_security(key_file, security), silence_seconds)


def join_listener(
    address: str, block_size: int, both: Security, silence_seconds: float = SILENCE_SECONDS
) -> JoinListener:
    """Listen as ``listen_for_joins`` does, with a key that may be in no file."""
    host, port = split_address("pool_listen", address, least_port=0)
    try:
        listener = ZmqListener("127.0.0.1" if host == "localhost" else host, port, both.secret, role=S_WORKER)
    except OSError as error:
        raise ConfigError(f"pool_listen: {error.strerror}") from None
    link = partial(connect, security=both, silence_seconds=silence_seconds)
    return JoinListener(listener, link, block_size)


def connect(
    address: str,
    security: Security,
    silence_seconds: float = SILENCE_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
    beats: bool = False,
) -> Link:
    """A link to the R-worker at ``address`` ("host:port"), which waits ``patience_seconds`` for a sign of life of this
    process. ``beats``: so that it knows a stopped process from a busy one, too.

    BackendError where the two sides do not share a key.
    """
    channel = ZmqChannel(
        address, security.curve_secret, silence_seconds=silence_seconds, patience_seconds=patience_seconds
    )
    channel.diagnose = partial(_diagnose, address)
    link = Link(proven(channel, security, address))
    if beats and security.proof_key is None:  # who has only proven the key on another connection is a stranger
        link.make_beats = partial(Beats, address, security.curve_secret, patience_seconds=patience_seconds)
    return link


def _diagnose(address: str) -> str:
    """Why no ZeroMQ socket answers at ``address``; "" where one does, or where nothing listens yet.

    A ZeroMQ socket greets every connection at once with 0xFF, eight bytes, 0x7F (ZMTP 3.1, section 3.2).
    """
    try:
        with socket.create_connection(split_address("r_workers", address), GREETING_SECONDS) as probe:
            greeting = probe.recv(GREETING_BYTES, socket.MSG_WAITALL)
    except TimeoutError:
        return "it accepts connections and sends nothing: no R-worker listens there, or its process hangs"
    except OSError:
        return ""
    if len(greeting) == GREETING_BYTES and (greeting[0], greeting[-1]) == (0xFF, 0x7F):
        return ""
    return "no R-worker listens there: what answers does not use FastDecode's protocol"


class Server:
    """The R-worker's loop: serves the first S-worker that asks, frees everything when it goes, or keeps it for its
    session, and serves the next.

    ``joiner``: sends JOIN while no S-worker is served. ``security``: with a proof key, an S-worker must prove to hold
    it before its HELLO. ``listens_at``: the host of ``listener``, where a KV port opens too. ``vitals``: as of
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
        self._gate = None if self._security.proof_key is None else Gate(self._security.proof_key)
        self._session: Session | None = None
        self._lease = Lease()
        self._is_leaving = False
        self._serving = ""
        self._logged: set[bytes] = set()
        listener.on_stranger = self._refuse_stranger

    def run(self) -> None:
        """Return once this R-worker was asked to leave and its S-worker has let it go."""
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
                on_open = partial(self._on_open, channel)
                self._session = Session(
                    Link(channel), self._host, on_open, self._security, self._listens_at, self._vitals, self._lease
                )
                self._session.run()
                self._session = None
                log.info("free")
            channel.close()

    def leave(self) -> bool:
        """Ask the S-worker to move its sequences away, and end after that.

        False where the caller should end at once: no S-worker is served, or this was called before.
        """
        if self._session is None or self._is_leaving:
            return False
        self._is_leaving = self._session.leaving = self._vitals.is_leaving = True
        return True

    def _admits(self, peer: PeerChannel) -> bool:
        """True when ``peer`` may open a session; with a gate this reads the peer's message, which must be a proof."""
        if self._gate is None and _kind(peer) is Kind.CHALLENGE:
            self._log_once(peer, "a peer that asks for proof of a key, and this R-worker has none")
            _refuse(peer, "key", f"it has no key: {BOTH_SIDES}")
            return False
        if self._gate is not None:
            return self._gate.admits(peer, peer.identity) and _send(peer, Kind.PROVEN)
        return True

    def _on_open(self, channel: PeerChannel, hello: Hello) -> None:
        channel.waits = True
        self._serving = hello.name
        log.info("serving %s", hello.name)

    def _refuse_stranger(self, peer: PeerChannel) -> None:
        """Tell a second S-worker the name of the first; other frames of strangers are dropped and logged once each.

        One that is to come after the first, in a named session, is let in on its next attempt where that one is silent.
        """
        hello = None
        if self._gate is None:
            wants_service = _kind(peer) is Kind.HELLO
            hello = _hello(peer) if wants_service else None
            if not (hello and hello.lease and hello.lease.waits):
                self._log_once(peer, "a second S-worker" if wants_service else "a frame of a peer that is not served")
        else:
            wants_service = self._gate.admits(peer, peer.identity)
        if not wants_service:
            return
        if hello and (reason := self._lease.superseded(hello.lease)):
            _refuse(peer, "superseded", reason)
            return
        if self._session and hello and self._lease.may_pass_to(hello, self._has_stopped):
            self._session.give_way(hello.name)
        _refuse(peer, "busy", f"it serves another S-worker, {self._serving}")

    def _has_stopped(self) -> bool:
        """Whether the S-worker that is served sends no heartbeats any more."""
        epoch = self._session.epoch if self._session else 0
        return self._gate is None and not self._listener.reaches(beats_name(epoch))

    def _log_once(self, peer: PeerChannel, what: str) -> None:
        if peer.identity not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(peer.identity)
            log.warning("refused: %s", what)


def _send(peer: PeerChannel, kind: Kind, *parts: bytes) -> bool:
    """False when ``peer`` has gone."""
    try:
        Conversation(peer).send(kind, *parts)
    except ConnectionError:
        return False
    return True


def _refuse(peer: PeerChannel, error: str, message: str) -> None:
    _send(peer, Kind.REFUSED, encode_refusal(error, message))


def _hello(peer: PeerChannel) -> Hello | None:
    """What ``peer`` has sent, None where that is no HELLO as it should be."""
    talk = Conversation(peer)
    try:
        frame = talk.receive(0.0)
        return decode_hello(talk.body(frame, MAX_HELLO_BYTES)) if frame and frame.kind is Kind.HELLO else None
    except FrameError:
        return None


def _kind(peer: PeerChannel) -> Kind | None:
    """The kind of the first frame that ``peer`` sent, None where that is no frame."""
    try:
        return decode(peer.first_header or b"").kind
    except FrameError:
        return None
