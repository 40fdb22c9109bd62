"""An engine's journal in the memory of two of its R-workers, so that the next engine may be on another host."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastdecode.cluster.pool.remote_stores import RemoteJournal
from fastdecode.cluster.wire.leases import MOST_JOURNAL_BYTES
from fastdecode.core.errors import WorkerLostError, interrupts_deferred

if TYPE_CHECKING:
    from fastdecode.cluster.pool.backend import PoolBackend

COPIES = 2

logger = logging.getLogger(__name__)


class JournalCopies:
    """Keeps the journal on two R-workers of ``pool``, on two hosts if possible; see ``fastdecode.journal.places``.

    If one of the two is lost, another R-worker gets the whole journal, from this process's copy, before the next write.
    """

    name = "R-workers"
    growth_bytes = 1 << 24
    most_bytes: float = MOST_JOURNAL_BYTES
    is_own = True
    """True: no other engine can write here, since a superseded S-worker gets a SupersededError."""

    def __init__(self, pool: PoolBackend) -> None:
        self._pool = pool
        self._holders: list[RemoteJournal] = []
        self._data = bytearray()
        self._was_kept = False

    def copies(self) -> list[bytes]:
        """Return the journal's copy of each R-worker that has one and is not lost."""
        found = []
        for journal in self._able():
            try:
                found.append(journal.recall())
            except WorkerLostError as error:
                logger.warning("%s", error)
        return [each for each in found if each]

    def written(self) -> bytes:
        return bytes(self._data)

    @interrupts_deferred()
    def replace(self, data: bytes) -> None:
        self._check(len(data))
        self._data = bytearray(data)
        self._holders = _told(self._holders, 0, data)
        self._spread()

    @interrupts_deferred()
    def append(self, data: bytes) -> None:
        start = len(self._data)
        self._check(start + len(data))
        self._data += data
        self._holders = [each for each in self._holders if _did(each.record, start, data)]

    @interrupts_deferred()
    def settle(self) -> None:
        self._holders = [each for each in self._holders if _did(each.recorded)]
        self._spread()

    @interrupts_deferred()
    def end(self, data: bytes) -> None:
        """Free all copies of the journal, outdated ones too, since the session ends."""
        self._holders = _told(self._able(), 0, b"")

    def close(self) -> None:
        self._holders = []

    def _check(self, num_bytes: int) -> None:
        if num_bytes > MOST_JOURNAL_BYTES:
            raise OSError(
                errno.EFBIG, f"a journal of {num_bytes:,} bytes is more than an R-worker keeps, {MOST_JOURNAL_BYTES:,}"
            )

    def _able(self) -> list[RemoteJournal]:
        return [worker.journal for worker in self._pool.workers if worker.journal and worker.journal.is_there]

    def _spread(self) -> None:
        """Copy the journal to more R-workers until ``COPIES`` of them have it, or no other R-worker is left."""
        others = [] if len(self._holders) >= COPIES else [each for each in self._able() if each not in self._holders]
        while len(self._holders) < COPIES and others:
            hosts = {each.host for each in self._holders}
            best = min(others, key=lambda each: each.host in hosts)
            others.remove(best)
            self._holders += _told([best], 0, bytes(self._data))
            logger.info("R-worker %s keeps the journal", best.name)
        if self._was_kept and not self._holders:
            logger.warning("no R-worker that kept the journal is left: if this engine ends now, its requests are lost")
        self._was_kept = bool(self._holders)


def _told(journals: Iterable[RemoteJournal], start: int, data: bytes) -> list[RemoteJournal]:
    """Write ``data`` at byte ``start`` of all ``journals``; return the journals whose R-workers are not lost."""
    sent = [journal for journal in journals if _did(journal.record, start, data)]
    return [journal for journal in sent if _did(journal.recorded)]


def _did(act: Callable[..., None], *values: Any) -> bool:
    """Call ``act``; return False if its R-worker is lost. The pool notices the loss at its next step."""
    try:
        act(*values)
    except WorkerLostError as error:
        logger.info("%s", error)
        return False
    return True
