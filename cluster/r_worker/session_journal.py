"""The journal of a named session in an R-worker's memory, and the frames by which S-workers write and read it."""

from __future__ import annotations

from collections.abc import Callable

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.leases import FIRST_BYTE, MOST_JOURNAL_BYTES
from fastdecode.cluster.wire.messages import NUM_BYTES
from fastdecode.core.errors import CapacityError, FrameError


class SessionJournal:
    """Bytes that mean nothing here; ``MOST_JOURNAL_BYTES`` at most, and while all is written anew once more as many."""

    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return len(self.data)

    def check(self, start: int, num_bytes: int) -> None:
        """Whether ``num_bytes`` from byte ``start`` on may be written: at the end, or all of it anew.

        Raises:
            FrameError: something else lies there.
            CapacityError: it would be too long.
        """
        if start not in (0, self.num_bytes):
            raise FrameError(f"RECORD: bytes from {start:,} on, and the journal has {self.num_bytes:,}")
        if start + num_bytes > MOST_JOURNAL_BYTES:
            raise CapacityError(
                f"a journal of {start + num_bytes:,} bytes; an R-worker keeps {MOST_JOURNAL_BYTES:,} at most"
            )

    def write(self, start: int, data: bytearray) -> None:
        """See ``check``, which must have passed."""
        if start:
            self.data += data
        else:
            self.data = data

    def clear(self) -> None:
        """Free it."""
        self.data = bytearray()


class JournalDoor:
    """Answers RECORD and RECALL of one S-worker: no other writes, so one that was superseded does not."""

    def __init__(self, link: Link, journal: SessionJournal) -> None:
        self._link, self._journal = link, journal
        self.handlers: dict[Kind, Callable[[Frame], None]] = {Kind.RECORD: self._record, Kind.RECALL: self._recall}

    def _record(self, frame: Frame) -> None:
        """What is announced is checked before memory is taken."""
        if frame.lengths[0] != FIRST_BYTE.size or frame.lengths[2]:
            raise FrameError(f"a RECORD frame with parts of {frame.lengths} bytes")
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
