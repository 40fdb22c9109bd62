"""Where R-workers ask to be let into a running job."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fastdecode.addresses import is_loopback, split_address
from fastdecode.cluster.frames import Conversation, Kind
from fastdecode.cluster.messages import decode_join
from fastdecode.cluster.path import Path
from fastdecode.cluster.remote import RemoteWorker
from fastdecode.cluster.zeromq import ZmqListener
from fastdecode.errors import FastDecodeError, FrameError
from fastdecode.types import KVLayout, RWorkerInfo

MOST_MEMBERS = 4096
"""Addresses that are remembered; asking is free, so there must be an end."""

MOST_JOIN_BYTES = 1 << 12

MOST_AT_ONCE = 64
"""Questions that are heard between two steps: whoever asks without end does not hold up the job."""

MOST_LOGGED = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Newcomer:
    """An R-worker that is open, and what it is."""

    worker: RemoteWorker
    info: RWorkerInfo


class Lobby:
    """R-workers say where they listen; each is connected to, and opened, in a thread of its own, so that nobody waits.

    One that is here, or was dismissed, is not let in again; one that was lost is.
    """

    def __init__(self, listener: ZmqListener, connect: Callable[[str], Path], block_size: int) -> None:
        """``connect``: the path to an R-worker at "host:port"."""
        self._listener, self._connect, self._block_size = listener, connect, block_size
        self._known: set[str] = set()
        self._refused: set[str] = set()
        self._opened: queue.SimpleQueue[Newcomer] = queue.SimpleQueue()
        self._layout: KVLayout | None = None

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return self._listener.address.removeprefix("tcp://")

    def open(self, layout: KVLayout) -> None:
        """From now on newcomers are opened for ``layout``."""
        self._layout = layout

    def newcomers(self) -> list[Newcomer]:
        """Those that are ready since the last call; never waits."""
        for _ in range(MOST_AT_ONCE):
            if self._layout is None or (channel := self._listener.accept(0.0)) is None:
                break
            conversation = Conversation(channel)
            try:
                frame = conversation.receive(0.0)
                if frame is None or frame.kind is not Kind.JOIN:
                    raise FrameError("it sent something else than JOIN")
                self._ask_in(decode_join(conversation.body(frame, MOST_JOIN_BYTES)), self._layout)
            except FrameError as error:
                self._log_once(str(error))
            channel.close()
        return [self._opened.get_nowait() for _ in range(self._opened.qsize())]

    def forget(self, address: str) -> None:
        """The R-worker at ``address`` may ask again."""
        self._known.discard(address)

    def close(self) -> None:
        """Those that nobody has fetched are let go; may be called twice."""
        self._layout = None
        self._listener.close()
        while not self._opened.empty():
            self._opened.get_nowait().worker.close()

    def _log_once(self, reason: str) -> None:
        if reason not in self._refused and len(self._refused) < MOST_LOGGED:
            self._refused.add(reason)
            log.warning("refused to let an R-worker join: %s", reason)

    def _ask_in(self, address: str, layout: KVLayout) -> None:
        if address in self._known:
            return
        if not self._listener.is_guarded and not is_loopback(split_address("JOIN", address)[0]):
            raise FrameError(f"it listens at {address}, beyond this machine, and this pool has no key file")
        if len(self._known) >= MOST_MEMBERS:
            raise FrameError(f"{MOST_MEMBERS} R-workers have joined already")
        self._known.add(address)
        threading.Thread(target=self._open, args=(address, layout), name=f"join {address}", daemon=True).start()

    def _open(self, address: str, layout: KVLayout) -> None:
        worker = RemoteWorker(address, lambda: self._connect(address), self._block_size)
        try:
            worker.open(layout)
            self._opened.put(Newcomer(worker, worker.opened()))
        except FastDecodeError as error:
            worker.close()
            log.warning("an R-worker asked to join and cannot: %s", error)
            self._known.discard(address)
