"""R-workers that wait for the pool to admit them: lost ones that return, and new ones that have joined."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastdecode.cluster.pool.worker import Joined
from fastdecode.core.errors import FastDecodeError, SupersededError
from fastdecode.kinds.layout import KVLayout

if TYPE_CHECKING:  # most pools have no listener, and so need no ZeroMQ
    from fastdecode.cluster.pool.joining import JoinListener
    from fastdecode.cluster.pool.remote import RemoteWorker

logger = logging.getLogger(__name__)


class Returns:
    """Waits for lost R-workers that send no JOIN: for each, a thread tries to connect until the R-worker answers."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._returned: queue.SimpleQueue[Joined] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._superseded: SupersededError | None = None

    def expect(self, make: Callable[[], RemoteWorker]) -> None:
        """Start a thread that opens ``make()``, a new client, repeatedly until its R-worker answers; never waits."""
        threading.Thread(target=self._await, args=(make,), name="return", daemon=True).start()

    def take(self) -> list[Joined]:
        """Return the R-workers that have returned since the last call.

        Raise SupersededError if one of them already serves a newer S-worker of this session.
        """
        if self._superseded:
            raise self._superseded
        return [self._returned.get() for _ in range(self._returned.qsize())]

    def close(self) -> None:
        """Stop all threads, and close returned R-workers that ``take`` has not returned; may be called twice."""
        self._is_closed.set()
        self._superseded = None
        for joined in self.take():
            joined.worker.close()

    def _await(self, make: Callable[[], RemoteWorker]) -> None:
        # Seconds between two attempts to open a lost R-worker
        return_seconds = 1.0
        while not self._is_closed.wait(return_seconds):
            worker = make()
            try:
                worker.open(self._layout)
                joined = Joined(worker, worker.opened())
            except SupersededError as error:
                worker.close()
                self._superseded = error
                return
            except FastDecodeError as error:
                worker.close()
                logger.debug("a lost R-worker has not come back yet: %s", error)
                continue
            self._returned.put(joined)
            if self._is_closed.is_set():
                self.close()
            return


class Newcomers:
    """R-workers that have joined and wait for the pool to admit them."""

    def __init__(self, listener: JoinListener) -> None:
        """``listener`` is closed with this object."""
        self._listener = listener
        self._waiting: list[Joined] = []
        self._asked_to_leave: set[str] = set()

    def open(self, layout: KVLayout) -> None:
        self._listener.open(layout)

    @property
    def num_waiting(self) -> int:
        """Number of R-workers that have joined and are not admitted yet; never waits."""
        self._waiting += self._listener.joined()
        return len(self._waiting)

    def take(self, most: int | None = None) -> list[Joined]:
        """Remove and return the first ``most`` waiting R-workers; all if ``most`` is None."""
        count = self.num_waiting if most is None else most
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def asks_to_leave(self, name: str) -> None:
        """Note that the R-worker ``name`` asks to leave."""
        self._asked_to_leave.add(name)

    def forget(self, name: str) -> None:
        """Note that the R-worker ``name`` is lost, and may join again."""
        self._asked_to_leave.discard(name)
        self._listener.forget(name)

    def dismiss(self, name: str) -> None:
        """Note that the R-worker ``name`` was dismissed.

        If it had asked to leave, it may join again only as a new process.
        """
        has_asked = name in self._asked_to_leave
        self.forget(name)
        if not has_asked:
            self._listener.dismissed(name)

    def exclude(self, name: str) -> None:
        """Ignore the R-worker ``name`` from now on, while it keeps asking to join."""
        self._listener.dismissed(name)

    def close(self) -> None:
        """Close the listener and the waiting R-workers; may be called twice."""
        self._listener.close()
        for joined in self._waiting:
            joined.worker.close()
        self._waiting = []
