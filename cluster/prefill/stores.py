"""The R-workers that store a job's rows: which of them get no more, and when all others have everything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdecode.cluster.prefill.messages import Prompt
from fastdecode.cluster.prefill.rows import Arrays

Send = Callable[[int, int, Arrays], int]
"""Queues rows of a layer to be sent: layer, first position, and the rows; returns their bytes."""


@dataclass(frozen=True)
class StoreWay:
    """A destination of tokens ``start`` to ``end`` of a prompt.

    ``send`` queues rows for their R-worker by position, and raises ConnectionError once that is gone. ``ticket``: the
    R-worker's number for them.
    """

    start: int
    end: int
    send: Send
    ticket: int


class Stores:
    """The ways of one part of a prompt to the R-workers that store it. For any thread.

    ``missed``: tickets of R-workers that get no more; ``num_bytes``: that were queued.
    """

    def __init__(self, prompt: Prompt, ways: Sequence[StoreWay]) -> None:
        self._start, self._end, self._ways = prompt.start, prompt.end, ways
        self._lock = threading.Lock()
        self._to_store: list[int] = []
        self._when_stored: Callable[[], None] | None = None
        self.missed: set[int] = set()
        self.num_bytes = 0

    def send(self, queue: Callable[[Send, int, int], int]) -> None:
        """Have ``queue`` queue the rows of each R-worker: its way, first position and end.

        ConnectionError where an R-worker is gone and no other has its rows.
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
        """Send the R-worker that knows the prompt by ``ticket`` no more of it; return whether others store all rows."""
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
        """Call ``tell`` once ``stored`` was called for each of ``tickets`` that is not missed."""
        with self._lock:
            self._to_store = [each for each in tickets if each not in self.missed]
            self._when_stored = tell
        self._tell_if_stored()

    def stored(self, ticket: int) -> None:
        """Note that one of the ports of the R-worker with ``ticket`` has all rows."""
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
