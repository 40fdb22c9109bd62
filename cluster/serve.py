"""An R-worker that listens: one S-worker after another, until it is told to end."""

from __future__ import annotations

import logging
from functools import partial

from fastdecode.cluster.frames import Conversation, Kind, decode
from fastdecode.cluster.host import Host
from fastdecode.cluster.joining import Joiner
from fastdecode.cluster.messages import Hello, encode_refusal
from fastdecode.cluster.path import FramePath
from fastdecode.cluster.proof import BOTH_SIDES, Gate
from fastdecode.cluster.session import TICK_SECONDS, Session
from fastdecode.cluster.zeromq import PeerChannel, ZmqListener
from fastdecode.errors import FrameError

MOST_LOGGED = 100
"""Strangers that are told apart in the log; a flood of them is not worth more."""

log = logging.getLogger("fastdecode.r_worker")


class Server:
    """Serves whoever asks first, frees everything when it goes, and serves the next.

    ``joiner``: asks for somebody to serve. ``proof_key``: what an S-worker must prove to hold before; None where the
    connection says so, or nothing does.
    """

    def __init__(
        self, listener: ZmqListener, host: Host, joiner: Joiner | None = None, proof_key: bytes | None = None
    ) -> None:
        self._listener, self._host, self._joiner = listener, host, joiner
        self._gate = None if proof_key is None else Gate(proof_key)
        self._session: Session | None = None
        self._is_leaving = False
        self._serving = ""
        self._logged: set[bytes] = set()
        listener.on_stranger = self._refuse_stranger

    def run(self) -> None:
        """Return once this R-worker was asked to leave and nobody needs it any more."""
        while not self._is_leaving:
            if self._joiner:
                self._joiner.ask()
            channel = self._listener.accept(TICK_SECONDS)
            if channel is None:
                continue
            if self._admits(channel):
                self._session = Session(FramePath(Conversation(channel)), self._host, partial(self._on_open, channel))
                self._session.run()
                self._session = None
                log.info("free")
            channel.close()

    def leave(self) -> bool:
        """Have whoever is served move its sequences away, and then end; False where that is not to be waited for:
        nobody is served, or this was asked before."""
        if self._session is None or self._is_leaving:
            return False
        self._is_leaving = self._session.leaving = True
        return True

    def _admits(self, peer: PeerChannel) -> bool:
        """True when ``peer`` may open a session; reads its message only where it must prove something first."""
        if self._gate is None and _kind(peer) is Kind.CHALLENGE:
            self._log_once(peer, "a peer that wants a key proven, and this R-worker has none")
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
        """Tell a second S-worker who is served; anything else of strangers is dropped, and said so once each."""
        if self._gate is None:
            wants_service = _kind(peer) is Kind.HELLO
            self._log_once(peer, "a second S-worker" if wants_service else "a frame of a peer that is not served")
        else:
            wants_service = self._gate.admits(peer, peer.identity)
        if wants_service:
            _refuse(peer, "busy", f"it serves another S-worker, {self._serving}")

    def _log_once(self, peer: PeerChannel, who: str) -> None:
        if peer.identity not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(peer.identity)
            log.warning("refused: %s", who)


def _send(peer: PeerChannel, kind: Kind, *parts: bytes) -> bool:
    """False when ``peer`` has gone."""
    try:
        Conversation(peer).send(kind, *parts)
    except ConnectionError:
        return False
    return True


def _refuse(peer: PeerChannel, error: str, message: str) -> None:
    _send(peer, Kind.REFUSED, encode_refusal(error, message))


def _kind(peer: PeerChannel) -> Kind | None:
    """Of the frame that ``peer`` sent first, None if that is none."""
    try:
        return decode(peer.first_header or b"").kind
    except FrameError:
        return None
