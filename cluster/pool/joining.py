"""The listener at which R-workers join a running job. R-workers send JOINs with ``r_worker/joiner.py``."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from fastdecode.api.settings import is_loopback, split_address
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.links.peer import MOST_LOGGED
from fastdecode.cluster.links.zeromq import ZmqListener
from fastdecode.cluster.pool.attempts import Attempts
from fastdecode.cluster.pool.remote import RemoteWorker
from fastdecode.cluster.pool.worker import Joined
from fastdecode.cluster.wire.frames import Conversation, Kind
from fastdecode.cluster.wire.messages import PREFILL_WORKER, decode_join
from fastdecode.core.errors import FastDecodeError, FrameError
from fastdecode.kinds.layout import KVLayout

DISMISSED_SECONDS = 10.0
"""Seconds without a JOIN after which a dismissed R-worker counts as ended.

A later JOIN from its address comes from another R-worker.
"""

log = logging.getLogger(__name__)


class JoinListener:
    """Reads the addresses that R-workers send, and connects to each in its own thread, so that no step waits.

    JOINs of R-workers in the pool, and of dismissed R-workers that keep asking, are ignored. Lost R-workers may join
    again. ``dismissed_at``: by address, the time in seconds of the R-worker's dismissal or latest JOIN.
    ``invite_prefill_worker``: called with addresses of prefill workers; None if the job uses none.
    """

    def __init__(self, listener: ZmqListener, connect: Callable[[str], Link], block_size: int) -> None:
        """``connect`` returns the link to the R-worker at "host:port"."""
        self._listener, self._connect, self._block_size = listener, connect, block_size
        self._known: set[str] = set()
        self.dismissed_at: dict[str, float] = {}
        self.attempts = Attempts()
        self._refused: set[str] = set()
        self._opened: queue.SimpleQueue[Joined] = queue.SimpleQueue()
        self._layout: KVLayout | None = None
        self.invite_prefill_worker: Callable[[str], None] | None = None

    @property
    def address(self) -> str:
        """The address of this listener, "host:port"."""
        return self._listener.address.removeprefix("tcp://")

    def open(self, layout: KVLayout) -> None:
        """Open caches for ``layout`` on R-workers that join from now on."""
        self._layout = layout

    def joined(self) -> list[Joined]:
        """Return the R-workers that have joined and opened their caches since the last call; never waits."""
        most_join_bytes = 1 << 12
        # Most JOINs read between two steps, so that a flood of them does not delay the job
        most_at_once = 64
        for _ in range(most_at_once):
            if self._layout is None or (channel := self._listener.accept(0.0)) is None:
                break
            conversation = Conversation(channel)
            try:
                frame = conversation.receive(0.0)
                if frame is None or frame.kind is not Kind.JOIN:
                    raise FrameError("a message came that is no JOIN")
                self._connect_to(*decode_join(conversation.body(frame, most_join_bytes)), self._layout)
            except FrameError as error:
                self._log_once(str(error))
            channel.close()
        self._forget_silent()  # only now, since a queued JOIN shows that its sender is not silent
        return [self._opened.get_nowait() for _ in range(self._opened.qsize())]

    def forget(self, address: str) -> None:
        """Allow the R-worker at ``address`` to join again."""
        self._known.discard(address)

    def dismissed(self, address: str) -> None:
        """Ignore the dismissed R-worker at ``address``, which has not ended and keeps asking."""
        self._known.discard(address)
        self.dismissed_at[address] = time.monotonic()

    def close(self) -> None:
        """Close the listener, and R-workers that ``joined`` has not returned yet; may be called twice."""
        self._layout = None
        self._listener.close()
        while not self._opened.empty():
            self._opened.get_nowait().worker.close()

    def _log_once(self, reason: str) -> None:
        if reason not in self._refused and len(self._refused) < MOST_LOGGED:
            self._refused.add(reason)
            log.warning("refused to let an R-worker join: %s", reason)

    def _forget_silent(self) -> None:
        ended = time.monotonic() - DISMISSED_SECONDS
        for address in [each for each, asked in self.dismissed_at.items() if asked < ended]:
            del self.dismissed_at[address]

    def _connect_to(self, address: str, role: str, layout: KVLayout) -> None:
        if address in self.dismissed_at:
            self.dismissed_at[address] = time.monotonic()
            return
        if address in self._known or not self.attempts.may_try(address):
            return
        if not self._listener.is_guarded and not is_loopback(split_address("JOIN", address)[0]):
            raise FrameError(f"the R-worker listens at {address}, beyond this machine, and this pool has no key file")
        if role == PREFILL_WORKER:
            if self.invite_prefill_worker is None:
                raise FrameError(f"{address} is a prefill worker, and this job was started without --prefill-workers")
            self.invite_prefill_worker(address)
            return
        # Most remembered addresses. JOINs cost their sender nothing, so the number of addresses must be limited.
        most_addresses = 4096
        if len(self._known) >= most_addresses:
            raise FrameError(f"{most_addresses} R-workers have joined already")
        self._known.add(address)
        threading.Thread(target=self._open, args=(address, layout), name=f"join {address}", daemon=True).start()

    def _open(self, address: str, layout: KVLayout) -> None:
        worker = RemoteWorker(address, lambda: self._connect(address), self._block_size)
        try:
            worker.open(layout)
            self._opened.put(Joined(worker, worker.opened()))
            self.attempts.succeeded(address)
        except FastDecodeError as error:
            worker.close()
            if self.attempts.failed(address, str(error)):
                log.warning("an R-worker asked to join and cannot: %s", error)
            self._known.discard(address)
