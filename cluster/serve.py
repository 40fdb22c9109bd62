"""An R-worker that listens: one S-worker after another, until it is told to end."""

from __future__ import annotations

import contextlib
import logging

from fastdecode.cluster.frames import Conversation, Kind, decode
from fastdecode.cluster.host import Host
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

    def __init__(self, listener: ZmqListener, host: Host) -> None:
        self._listener, self._host = listener, host
        self._serving = ""
        self._logged: set[bytes] = set()
        listener.on_stranger = self._refuse_stranger

    def run(self) -> None:
        """Does not return."""
        while True:
            channel = self._listener.accept(TICK_SECONDS)
            if channel is not None:
                Session(FramePath(Conversation(channel)), self._host, self._on_open).run()
                channel.close()
                log.info("free")

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
