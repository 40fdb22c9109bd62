"""The journal of a named session in an R-worker's memory, and the frames by which S-workers write and read it."""

from __future__ import annotations

from collections.abc import Callable

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.leases import FIRST_BYTE, MOST_JOURNAL_BYTES
from fastdecode.cluster.wire.messages import NUM_BYTES
from fastdecode.core.errors import CapacityError, FrameError


class SessionJournal:
    """A journal's bytes, opaque to the R-worker: at most ``MOST_JOURNAL_BYTES``, twice that while it is replaced."""

    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def check(self, start: int, num_bytes: int) -> None:
        """Check that ``num_bytes`` from byte ``start`` on may be written: at the end, or from 0 to replace it.

        Raises:
            FrameError: ``start`` is neither 0 nor the journal's end.
            CapacityError: the journal would be too long.
        """
        if start not in (0, self.num_bytes):
            raise FrameError(f"RECORD: bytes from {start:,} on, and the journal has {self.num_bytes:,}")
        if start + num_bytes > MOST_JOURNAL_BYTES:
            raise CapacityError(
                f"a journal of {start + num_bytes:,} bytes; an R-worker keeps {MOST_JOURNAL_BYTES:,} at most"
            )

    def write(self, start: int, data: bytearray) -> None:
        """Write ``data`` at ``start``; ``check`` must have passed."""
        if start:
            self.data += data
        else:
            self.data = data

    def clear(self) -> None:
        self.data = bytearray()


class JournalDoor:
    """Answers RECORD and RECALL of one S-worker. Only the served S-worker can write, so a superseded one cannot."""

    def __init__(self, link: Link, journal: SessionJournal) -> None:
        self._link, self._journal = link, journal
        self.handlers: dict[Kind, Callable[[Frame], None]] = {Kind.RECORD: self._record, Kind.RECALL: self._recall}

    def _record(self, frame: Frame) -> None:
        """Receive bytes of the journal; check their announced number before memory is allocated."""
        if frame.lengths[0] != FIRST_BYTE.size or frame.lengths[2]:
            raise FrameError(f"a RECORD frame with parts of {frame.lengths} bytes, not of {FIRST_BYTE.size} and any")
        first = bytearray(FIRST_BYTE.size)
        self._link.read_into(first)
        (start,) = FIRST_BYTE.unpack(first)
        self._journal.check(start, frame.lengths[1])
        data = bytearray(frame.lengths[1])
        self._link.read_into(data)
        self._journal.write(start, data)
        self._link.send(Kind.RECORDED, NUM_BYTES.pack(self._journal.num_bytes))

    def _recall(self, frame: Frame) -> None:
        self._link.send(Kind.RECALLED, bytes(self._journal.data))
