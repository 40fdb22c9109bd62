"""A listener's channel to one of the peers that have connected to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

MOST_LOGGED = 100
"""Most unknown peers of one socket for which a log line each is written."""


class PeerListener(Protocol):
    """The interface that a ``PeerChannel`` needs of its listener, such as ``ZmqListener``."""

    on_stranger: Callable[[PeerChannel], None]

    def next_peer(self) -> PeerChannel | None: ...

    def poll(self, timeout_seconds: float) -> bool: ...

    def read_into(self, buffer: Any) -> None: ...

    def skip(self) -> None: ...

    def send_to(self, identity: bytes, parts: Sequence[Any], waits: bool) -> None: ...

    def look_at_connections(self) -> bool: ...


class PeerChannel:
    """An R-worker's ``Channel`` to one S-worker. Messages of other peers go to the listener's ``on_stranger``.

    ``waits``: whether a send waits if the queue to this peer is full; otherwise the message is dropped. It is set only
    for the served peer, so another peer that reads nothing cannot delay the listener.
    """

    def __init__(self, listener: PeerListener, identity: bytes, first_header: bytes | None = None) -> None:
        self._listener = listener
        self.identity, self.first_header = identity, first_header
        self.waits, self._probe_until = False, 0.0
        self.read_into = self._listener.read_into

    def send(self, parts: Sequence[Any]) -> None:
        self._listener.send_to(self.identity, parts, self.waits)

    def receive(self, timeout_seconds: float) -> bytes | None:
        """See ``Channel.receive``. Another peer's message ends a wait early.

        So many peers that ask again and again cannot keep the caller from its other work.
        """
        if self.first_header is not None:
            first, self.first_header = self.first_header, None
            return first
        self._listener.skip()
        while True:
            peer = self._listener.next_peer()
            if peer is None:
                if timeout_seconds and self._listener.poll(timeout_seconds):
                    continue
                if timeout_seconds:
                    self._look_at_connection()
                return None
            if peer.identity == self.identity:
                return peer.first_header
            self._listener.on_stranger(peer)
            self._listener.skip()
            if timeout_seconds:
                self._look_at_connection()
                return None

    def close(self) -> None:
        """See ``Channel.close``; the listener stays open."""
        self._listener.skip()

    def _look_at_connection(self) -> None:
        """If any peer's connection has ended, test this peer's. Raise ConnectionError if this peer is gone."""
        has_ended, now = self._listener.look_at_connections(), time.monotonic()
        # Seconds for which this peer is tested after some connection has ended
        departure_seconds = 2.0
        if has_ended:
            self._probe_until = now + departure_seconds
        if now < self._probe_until:
            self.send([b""])
