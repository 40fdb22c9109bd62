"""An engine's heartbeat file beside its journal. A standby uses it to tell a stopped engine from a busy one."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

SILENT_SECONDS = 2.0
"""Seconds without a heartbeat after which an engine counts as stopped, if R-workers wait for its frames."""

FILE = "pulse"


class Pulse:
    """Touches the heartbeat file in ``folder`` from its own thread, until ``close``."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / FILE
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat."""
        self._ended.set()
        self._thread.join(SILENT_SECONDS)

    def _run(self) -> None:
        beat_seconds = 0.25
        while not self._ended.wait(beat_seconds):
            with contextlib.suppress(OSError):
                self._path.touch()


class Listening:
    """Watches the heartbeat file in ``folder``; this machine's clock, not the file's time, measures its silence."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / FILE
        self._last, self._heard = self._beat(), time.monotonic()

    def is_silent(self) -> bool:
        """Return whether calls of this method have seen no heartbeat for ``SILENT_SECONDS``. So call it often."""
        beat = self._beat()
        if beat != self._last:
            self._last, self._heard = beat, time.monotonic()
        return time.monotonic() - self._heard > SILENT_SECONDS

    def _beat(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0
