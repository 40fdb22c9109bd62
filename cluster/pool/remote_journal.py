"""The S-worker's end of a journal that an R-worker keeps."""

from __future__ import annotations

from fastdecode.cluster.pool.calls import Calls
from fastdecode.cluster.wire.frames import Kind
from fastdecode.cluster.wire.leases import FIRST_BYTE, MOST_JOURNAL_BYTES
from fastdecode.cluster.wire.messages import NUM_BYTES


class RemoteJournal:
    """A session's journal in the memory of an R-worker in another process. Errors are those of ``PoolWorker``.

    ``name``: of the R-worker. ``host``: its machine as in ``RWorkerInfo``; "" before it is open.
    """

    def __init__(self, calls: Calls) -> None:
        self.name, self.host = calls.name, ""
        self._calls = calls
        self._num_bytes = 0

    @property
    def is_there(self) -> bool:
        """True if this side knows its R-worker as neither closed nor lost."""
        return self._calls.link is not None and not self._calls.lost

    def record(self, start: int, data: bytes) -> None:
        """Send bytes of the journal from byte ``start`` on; call ``recorded`` next.

        ``start`` is its end, or 0 to replace it.
        """
        self._calls.send(Kind.RECORD, FIRST_BYTE.pack(start), data)
        self._num_bytes = start + len(data)
        self._calls.owed = self.recorded

    def recorded(self) -> None:
        """Wait for the answer to ``record``, unless it was received already."""
        if self._calls.owed is None:
            return
        self._calls.owed = None
        num_bytes = self._calls.number(self._calls.answer(Kind.RECORDED, spins=False), NUM_BYTES)
        if num_bytes != self._num_bytes:
            raise self._calls.lose(f"it has {num_bytes:,} bytes of a journal of {self._num_bytes:,}")

    def recall(self) -> bytes:
        """Return the R-worker's copy of the journal; empty if there is none."""
        return self._calls.ask(Kind.RECALL, b"", Kind.RECALLED, bytes, MOST_JOURNAL_BYTES)
