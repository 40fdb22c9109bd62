"""The content of a journal's folder, read while an engine may write it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from fastdecode.journal import pulse
from fastdecode.journal.past import pasts_of
from fastdecode.journal.places import FILE
from fastdecode.journal.records import Began, read


@dataclass(frozen=True)
class JournalLook:
    """A summary of a journal file: its size, its requests, and how many of them have ended.
    ``num_whole``: bytes of complete records. ``pulse_seconds``: time since the engine's last heartbeat; None without
    one.
    """

    num_bytes: int
    num_whole: int
    num_requests: int
    num_ended: int
    pulse_seconds: float | None


def look_at(folder: str) -> JournalLook | None:
    """Return a summary of the journal in ``folder``; None if there is no journal of this format."""
    try:
        data = (Path(folder) / FILE).read_bytes()
    except OSError:
        return None
    records, chain = read(data)
    if not records or not isinstance(records[0], Began):
        return None
    pasts = pasts_of(records).values()
    try:
        beat = time.time() - (Path(folder) / pulse.FILE).stat().st_mtime
    except OSError:
        beat = None
    return JournalLook(len(data), chain.num_bytes, len(pasts), sum(past.ended for past in pasts), beat)
