"""The S-worker's communication thread: it moves messages on while the S-worker's own thread computes."""

from __future__ import annotations

import sys
import threading
import time
from typing import Protocol

PROGRESS_SECONDS = 200e-6
"""Between two looks while q, k, v are under way. Each takes some 50 µs from the S-worker, whose core it runs on."""

SWITCH_SECONDS = 1e-4
"""How long one thread may keep the other from Python; its default of 5 ms is the time of several layers."""


class Watched(Protocol):
    """What may have messages under way."""

    def move_on(self) -> bool:
        """Move them on a little; True while they have not arrived."""
        ...


class Progress:
    """Looks into MPI while anything that was sent is under way, and sleeps otherwise.

    An answer is not looked after: the S-worker's own thread does that whenever it has sent something or waits.
    """

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdecode-mpi", daemon=True)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._thread.start()

    def watch(self, path: Watched) -> None:
        """Look after ``path`` too."""
        self._watched = [*self._watched, path]

    def forget(self, path: Watched) -> None:
        """Look after it no longer."""
        self._watched = [each for each in self._watched if each is not path]

    def nudge(self) -> None:
        """Something is under way."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread: MPI must not end under it."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            time.sleep(PROGRESS_SECONDS)  # by then most have arrived
            while not self._stopped and self._move_on():
                time.sleep(PROGRESS_SECONDS)

    def _move_on(self) -> bool:
        moved = [path.move_on() for path in self._watched]
        return any(moved)
