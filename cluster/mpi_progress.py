"""The S-worker's communication thread: it moves messages on while the S-worker's own thread computes."""

from __future__ import annotations

import sys
import threading
import time
from typing import Protocol

PROGRESS_SECONDS = 200e-6
"""Between two looks, while a layer is under way: about a hundredth of the core that the S-worker computes on."""

LOOKED_AFTER_SECONDS = 1e-3
"""Between two looks while somebody else looks all the time, whom this thread only disturbs."""

LINGER_SECONDS = 5e-3
"""How long the thread stays awake between layers: to wake it takes longer than most of them."""

SWITCH_SECONDS = 1e-4
"""How long one thread may keep the other from Python; its default of 5 ms is the time of several layers."""


class Mover(Protocol):
    """What has messages to move on."""

    last_look: float
    """When somebody did so last, in seconds of ``time.monotonic``."""

    def move_on(self) -> None:
        """Move them on a little."""
        ...


class Watched(Protocol):
    """What may have messages under way."""

    @property
    def under_way(self) -> bool:
        """True while it has."""
        ...


class Progress:
    """Looks into MPI while anything watched is under way, and sleeps otherwise."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._watched: list[Watched] = []
        self._stopped = self._awake = False
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
        if not self._awake:
            self._wake.set()

    def stop(self) -> None:
        """End the thread: MPI must not end under it."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._awake = True
            self._look_after(time.monotonic() + LINGER_SECONDS)
            self._awake = False
            if not self._under_way():  # what came under way before _awake was False did not wake this
                self._wake.clear()

    def _look_after(self, until: float) -> None:
        while not self._stopped and (now := time.monotonic()) < until:
            looked_after = now - self._mover.last_look < PROGRESS_SECONDS
            if self._under_way():
                until = now + LINGER_SECONDS
                if not looked_after:
                    self._mover.move_on()
            time.sleep(LOOKED_AFTER_SECONDS if looked_after else PROGRESS_SECONDS)

    def _under_way(self) -> bool:
        return any(path.under_way for path in self._watched)
