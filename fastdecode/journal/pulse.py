"""The sign of life of an engine beside its journal: one that stands by tells a stopped engine from a busy one."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

BEAT_SECONDS = 0.25

SILENT_SECONDS = 2.0
"""Without a beat, after which an engine counts as stopped: as long as R-workers wait for a frame of it."""

FILE = "pulse"


class Pulse:
    """Touches a file in ``folder`` from a thread of its own, until ``close``."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / FILE
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Beat no more."""
        self._ended.set()
        self._thread.join(SILENT_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                self._path.touch()


class Listening:
    """To the pulse in ``folder``, by the clock of this machine alone."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / FILE
        self._last, self._heard = self._beat(), time.monotonic()

    def is_silent(self) -> bool:
        """Return whether there was no beat for ``SILENT_SECONDS``; to be asked again and again."""
        beat = self._beat()
        if beat != self._last:
            self._last, self._heard = beat, time.monotonic()
        return time.monotonic() - self._heard > SILENT_SECONDS

    def _beat(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0
