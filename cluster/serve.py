"""An R-worker that listens: one S-worker after another, until it is told to end."""

from __future__ import annotations

import contextlib
import logging

from fastdecode.cluster.frames import Conversation, Kind, decode
from fastdecode.cluster.host import Host
from fastdecode.cluster.joining import Joiner
from fastdecode.cluster.messages import Hello, encode_refusal
from fastdecode.cluster.path import FramePath
from fastdecode.cluster.session import TICK_SECONDS, Session
from fastdecode.cluster.zeromq import PeerChannel, ZmqListener
from fastdecode.errors import FrameError

MOST_LOGGED = 100
"""Strangers that are told apart in the log; a flood of them is not worth more."""

log = logging.getLogger("fastdecode.r_worker")


class Server:
    """Serves whoever asks first, frees everything when it goes, and serves the next."""

    def __init__(self, listener: ZmqListener, host: Host, joiner: Joiner | None = None) -> None:
        """``joiner``: asks for somebody to serve."""
        self._listener, self._host, self._joiner = listener, host, joiner
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
            if channel is not None:
                self._session = Session(FramePath(Conversation(channel)), self._host, self._on_open)
                self._session.run()
                self._session = None
                channel.close()
                log.info("free")

    def leave(self) -> bool:
        """Have whoever is served move its sequences away, and then end; False where that is not to be waited for:
        nobody is served, or this was asked before."""
        if self._session is None or self._is_leaving:
            return False
        self._is_leaving = self._session.leaving = True
        return True

    def _on_open(self, hello: Hello) -> None:
        self._serving = hello.name
        log.info("serving %s", hello.name)

    def _refuse_stranger(self, peer: PeerChannel) -> None:
        """Tell a second S-worker who is served; anything else of strangers is dropped, and said so once each."""
        try:
            wants_service = decode(peer.first_header or b"").kind is Kind.HELLO
        except FrameError:
            wants_service = False
        if peer.identity not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(peer.identity)
            who = "a second S-worker" if wants_service else "a frame of a peer that is not served"
            log.warning("refused: %s", who)
        if wants_service:
            busy = encode_refusal("busy", f"it serves another S-worker, {self._serving}")
            with contextlib.suppress(ConnectionError):
                Conversation(peer).send(Kind.REFUSED, busy)
