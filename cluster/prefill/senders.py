"""A prefill worker's threads that send or read keys and values during computing: one per destination or source."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fastdecode.cluster.prefill.kv_feed import KvFeed
from fastdecode.cluster.prefill.messages import Place, PlacedRows
from fastdecode.cluster.wire.handshake import Security
from fastdecode.core.errors import BackendError

POLL_SECONDS = 0.002
"""Seconds between two checks for answers."""


OnFailure = Callable[[list[int], Place, str, bool], None]
"""A function called after a failure: with affected job ids or tickets, port, reason, and whether the port is gone."""


@dataclass(frozen=True)
class Rows:
    """Rows of a layer to send. ``arrays``: (k, v), or (cached bytes,) of a prefix. ``start``: first row's position.

    ``job_id``: the number by which the receiver knows the rows: the job's id, or an R-worker's ticket.
    """

    job_id: int
    layer: int
    start: int
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Reading:
    """A request to read one layer of a prefix into ``stored``; ``when_read`` is called afterwards."""

    job_id: int
    layer: int
    stored: np.ndarray
    when_read: Callable[[], None]


@dataclass(frozen=True)
class Telling:
    """A request to call ``tell`` once the receiver has stored all rows sent for the job."""

    job_id: int
    tell: Callable[[], None]


Item = Rows | Reading | Telling

log = logging.getLogger("fastdecode.prefills.worker")


class Sender:
    """A queue of rows for one port, and the thread that sends them. The first failure ends the thread."""

    def __init__(self, place: Place, security: Security, on_failure: OnFailure) -> None:
        self.place = place
        self._security, self._on_failure = security, on_failure
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._is_closed, self._reason = False, ""
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=f"send to {place.address}", daemon=True).start()

    def send(self, job_id: int, layer: int, start: int, arrays: tuple[np.ndarray, ...]) -> int:
        """Queue rows of a layer from ``start`` on (see ``Rows``), which must not change any more; return their bytes.

        Raise ConnectionError once the thread has ended.
        """
        self._put(Rows(job_id, layer, start, arrays))
        return sum(each.nbytes for each in arrays)

    @property
    def has_ended(self) -> bool:
        """True once a failure has ended the thread."""
        return bool(self._reason)

    def close(self) -> None:
        """Drop the queued rows and end the thread; may be called twice."""
        self._is_closed = True
        self._queue.put(None)

    def _put(self, item: Item) -> None:
        with self._lock:  # nothing may be queued after the thread has emptied the queue
            if self._reason:
                raise ConnectionError(f"{self.place.address}: {self._reason}")
            self._queue.put(item)

    def _run(self) -> None:
        jobs: dict[int, None] = {}
        try:
            self._serve(jobs)
        except Exception as error:  # after any error, the jobs must not wait for ever
            known = isinstance(error, ConnectionError | BackendError)
            with self._lock:
                self._reason = str(error) or type(error).__name__
            while not self._queue.empty():
                if item := self._queue.get():
                    jobs[item.job_id] = None
            if not self._is_closed:
                log.warning("cannot send to %s: %s", self.place.address, error, exc_info=not known)
                self._on_failure(list(jobs), self.place, str(error), True)

    def _serve(self, jobs: dict[int, None]) -> None:
        """Send queued rows until ``close``; add to ``jobs`` the id of each job whose rows are sent."""
        raise NotImplementedError

    def _next(self, is_busy: bool) -> Item | None:
        """Wait for the next item of the queue. If ``is_busy`` (answers are due), return None after a short wait."""
        try:
            return self._queue.get(timeout=POLL_SECONDS if is_busy else None)
        except queue.Empty:
            return None


AnySender = TypeVar("AnySender", bound=Sender)


class Senders:
    """A prefill worker's threads, by task and port. A thread starts when its port is first asked for."""

    def __init__(self, security: Security, on_failure: OnFailure) -> None:
        self._security, self._on_failure = security, on_failure
        self._threads: dict[tuple[type[Sender], Place], Any] = {}

    def of(self, kind: type[AnySender], place: Place) -> AnySender:
        """Return the thread of class ``kind`` for ``place``; start it if there is none."""
        if (kind, place) not in self._threads:
            self._threads[kind, place] = kind(place, self._security, self._on_failure)
        return self._threads[kind, place]

    def of_each(self, kind: type[AnySender], placed: PlacedRows) -> list[AnySender]:
        """Return the threads of class ``kind`` for all KV ports of the R-worker in ``placed``."""
        return [self.of(kind, place) for place in placed.places]

    def drop_ended(self) -> None:
        """Forget threads that a failure has ended, so that a later job starts new ones."""
        for key in [key for key, sender in list(self._threads.items()) if sender.has_ended]:
            self._threads.pop(key, None)

    def close(self) -> None:
        threads, self._threads = self._threads, {}
        for sender in threads.values():
            sender.close()


class ChainSender(Sender):
    """Sends to the next prefill worker, which confirms each piece."""

    def _serve(self, jobs: dict[int, None]) -> None:
        feed = KvFeed(self.place.address, self.place.epoch, self._security)
        # Most jobs to fail if the next worker is lost: the latest that have sent rows to it
        most_remembered = 64
        try:
            while not self._is_closed:
                item = self._next(bool(feed.num_in_flight))
                if isinstance(item, Rows):
                    jobs[item.job_id] = None
                    while len(jobs) > most_remembered:
                        del jobs[next(iter(jobs))]
                    feed.store(item.job_id, item.layer, item.start, *item.arrays)
                for stored in feed.poll(0.0):
                    if stored.refusal:
                        self._on_failure([stored.job_id], self.place, stored.refusal, False)
        finally:
            feed.close()


class StoreSender(Sender):
    """Sends to the R-worker that holds the sequence, which confirms each stored piece."""

    def when_stored(self, job_id: int, tell: Callable[[], None]) -> None:
        """Call ``tell`` in this object's thread once the R-worker has stored all rows sent for ``job_id``."""
        self._put(Telling(job_id, tell))

    def _serve(self, jobs: dict[int, None]) -> None:
        waiting: dict[int, Callable[[], None]] = {}
        under_way: Counter[int] = Counter()
        feed = KvFeed(self.place.address, self.place.epoch, self._security)
        try:
            while not self._is_closed:
                item = self._next(bool(under_way.total()))
                if isinstance(item, Rows):
                    jobs[item.job_id] = None
                    under_way[item.job_id] += 1
                    feed.store(item.job_id, item.layer, item.start, *item.arrays)
                elif isinstance(item, Telling):
                    waiting[item.job_id] = item.tell
                for stored in feed.poll(0.0):
                    under_way[stored.job_id] -= 1
                    if stored.refusal:
                        waiting.pop(stored.job_id, None)
                        self._on_failure([stored.job_id], self.place, stored.refusal, False)
                for job_id in [each for each in waiting if not under_way[each]]:
                    del under_way[job_id]
                    jobs.pop(job_id, None)
                    waiting.pop(job_id)()
        finally:
            feed.close()


class PrefixReader(Sender):
    """Reads a cached prefix from the R-worker that holds the sequence."""

    def read(self, job_id: int, layer: int, stored: np.ndarray, when_read: Callable[[], None]) -> None:
        """Queue the reading of one layer into ``stored``, uint8 [rows, bytes]; then the thread calls ``when_read``.

        Raise ConnectionError once the thread has ended.
        """
        self._put(Reading(job_id, layer, stored, when_read))

    def _serve(self, jobs: dict[int, None]) -> None:
        waiting: deque[tuple[int, Callable[[], None]]] = deque()
        feed = KvFeed(self.place.address, self.place.epoch, self._security)
        try:
            while not self._is_closed:
                item = self._queue.get() if self._queue.qsize() or not waiting else None
                if isinstance(item, Reading):
                    waiting.append((item.job_id, item.when_read))
                    jobs[item.job_id] = None
                    feed.read(item.job_id, item.layer, 0, item.stored)
                for found in feed.poll(0.0 if item else POLL_SECONDS):
                    job_id, when_read = waiting.popleft()
                    if found.refusal:
                        self._on_failure([job_id], self.place, found.refusal, False)
                    else:
                        when_read()
                if not waiting:
                    jobs.clear()
        finally:
            feed.close()
