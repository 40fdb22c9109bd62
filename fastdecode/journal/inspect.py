"""What lies in a journal's folder, read beside an engine that may write it."""

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
    """``num_bytes`` of the file, of which ``num_whole`` are whole records; requests in it, and those that have ended.

    ``pulse_seconds``: since a session's engine gave a sign of life here, None if none ever did.
    """

    num_bytes: int
    num_whole: int
    num_requests: int
    num_ended: int
    pulse_seconds: float | None


def look_at(folder: str) -> JournalLook | None:
    """None if there is no journal of this format."""
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
