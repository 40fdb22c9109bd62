"""The S-worker's end of one prefill worker: its session over a link."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.prefill.messages import PrefillWelcome, decode_prefill_welcome
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.cluster.wire.messages import decode_refusal
from fastdecode.core.errors import BackendError, FrameError


class PrefillClient:
    """The client of one prefill worker over a link."""

    def __init__(
        self, name: str, connect: Callable[[], Link], end: Callable[[], None] = lambda: None, process_id: int = 0
    ) -> None:
        """``open`` calls ``connect``, which may raise BackendError.

        ``close`` calls ``end``, which ends the process.

        ``process_id``: the id of the process that this engine started for the prefill worker; 0 for none.
        """
        self.name, self.process_id = name, process_id
        self._connect, self._end = connect, end
        self.link: Link | None = None
        self.welcome: PrefillWelcome | None = None

    def open(self, hello: bytes) -> None:
        """Ask for a session. Raise BackendError if the worker is gone, or does not have this side's key."""
        self.link = self._connect()
        try:
            self.link.send(Kind.HELLO, hello)
        except ConnectionError as error:
            raise BackendError(f"prefill worker {self.name}: {error}") from error

    def opened(self, model: str) -> None:
        """Wait for the prefill worker's WELCOME. Raise BackendError if the worker refuses or does not answer."""
        # Most seconds from HELLO to WELCOME, since a starting prefill worker loads its model first
        open_seconds = 300.0
        link, deadline = self._open_link, time.monotonic() + open_seconds
        tick_seconds = 0.1
        try:
            while (frame := link.receive(tick_seconds)) is None:
                if time.monotonic() > deadline:
                    raise BackendError(f"prefill worker {self.name} did not answer within {open_seconds:g} s")
            if frame.kind is Kind.REFUSED:
                raise BackendError(f"prefill worker {self.name} refused: {refusal(link, frame)}")
            if frame.kind is not Kind.WELCOME:
                raise FrameError(f"a {frame.kind.name} frame came in place of WELCOME")
            self.welcome = decode_prefill_welcome(link.body(frame, MAX_JSON_BYTES))
        except (ConnectionError, FrameError) as error:
            raise BackendError(f"prefill worker {self.name}: {error}") from error
        if self.welcome.model != model:
            raise BackendError(f"prefill worker {self.name} has another model than this S-worker")

    @property
    def port_epoch(self) -> int:
        """The epoch that KV frames sent to this prefill worker's port must carry."""
        return self.welcome.port_epoch if self.welcome else 0

    @property
    def _open_link(self) -> Link:
        if self.link is None:
            raise BackendError(f"prefill worker {self.name} is closed")
        return self.link

    def close(self) -> None:
        """End the session, and the worker's process if this engine started one; may be called twice."""
        link, self.link = self.link, None
        if link is not None:
            try:
                if self.welcome:
                    link.send(Kind.BYE)
            except ConnectionError:
                pass  # the prefill worker is gone already, so it needs no BYE
            finally:
                link.close()
        self._end()


def refusal(link: Link, frame: Frame) -> str:
    """Return the other end's reason for refusing, from ``frame``."""
    return decode_refusal(link.body(frame, MAX_JSON_BYTES))[1]
