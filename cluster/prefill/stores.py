"""Tracks the R-workers that store a job's rows: which of them failed, and when the others have stored all rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdecode.cluster.prefill.messages import Prompt
from fastdecode.cluster.prefill.rows import Arrays

Send = Callable[[int, int, Arrays], int]
"""A function that queues rows to be sent: it takes layer, first position and rows, and returns their bytes."""


@dataclass(frozen=True)
class StoreWay:
    """An R-worker that stores the tokens from ``start`` to ``end`` of a prompt.

    ``send`` queues rows for the R-worker by position in the prompt, and raises ConnectionError once the R-worker is
    gone. ``ticket``: the R-worker's number for these tokens.
    """

    start: int
    end: int
    send: Send
    ticket: int


class Stores:
    """The R-workers that store one part of a prompt. Any thread may use this object.

    ``missed``: tickets of R-workers that get no more rows. ``num_bytes``: bytes of all rows queued.
    """

    def __init__(self, prompt: Prompt, ways: Sequence[StoreWay]) -> None:
        self._start, self._end, self._ways = prompt.start, prompt.end, ways
        self._lock = threading.Lock()
        self._to_store: list[int] = []
        self._when_stored: Callable[[], None] | None = None
        self.missed: set[int] = set()
        self.num_bytes = 0

    def send(self, queue: Callable[[Send, int, int], int]) -> None:
        """Call ``queue`` for each R-worker with its ``send``, first position and end, to queue the R-worker's rows.

        Raise ConnectionError if an R-worker is gone and no other R-worker has its rows.
        """
        for way in self._ways:
            if way.ticket in self.missed:
                continue
            try:
                self.num_bytes += queue(way.send, max(way.start, self._start), min(way.end, self._end))
            except ConnectionError:
                if not self.miss(way.ticket):
                    raise

    def miss(self, ticket: int) -> bool:
        """Send no more rows to the R-worker with ``ticket``; return whether other R-workers store all its rows."""
        with self._lock:
            self.missed.add(ticket)
            self._to_store = [each for each in self._to_store if each != ticket]
            reached = self._start
            for way in sorted(self._ways, key=lambda way: way.start):
                if way.ticket not in self.missed and way.start <= reached:
                    reached = max(reached, way.end)
        self._tell_if_stored()
        return reached >= self._end

    def when_stored(self, tickets: Sequence[int], tell: Callable[[], None]) -> None:
        """Call ``tell`` once ``stored`` was called for each of ``tickets``, except for those in ``missed``."""
        with self._lock:
            self._to_store = [each for each in tickets if each not in self.missed]
            self._when_stored = tell
        self._tell_if_stored()

    def stored(self, ticket: int) -> None:
        """Note that one KV port of the R-worker with ``ticket`` has stored all its rows."""
        with self._lock:
            if ticket in self._to_store:
                self._to_store.remove(ticket)
        self._tell_if_stored()

    def _tell_if_stored(self) -> None:
        with self._lock:
            tell = None if self._to_store else self._when_stored
            self._when_stored = None if tell else self._when_stored
        if tell:
            tell()
