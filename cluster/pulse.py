"""A word of shared memory that beats while its process runs: how silence is told from work."""

from __future__ import annotations

import threading

import numpy as np

BEAT_SECONDS = 0.2
SILENCE_SECONDS = 1.5
"""A process whose word stands still for so long is as good as gone."""


class Heart:
    """Counts ``word``, uint64 [1], up every BEAT_SECONDS, from a thread of its own: also while others compute."""

    def __init__(self, word: np.ndarray) -> None:
        self._word = word
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def stop(self) -> None:
        """May be called twice."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self._word += np.uint64(1)


class Pulse:
    """The other side's view of a :class:`Heart`."""

    def __init__(self, word: np.ndarray) -> None:
        self._word = word
        self._last = 0
        self._silent_seconds = 0.0

    def check(self, waited_seconds: float) -> None:
        """After a wait in which nothing came: ConnectionError once such waits add up to SILENCE_SECONDS without a beat.

        Only waiting counts: after a time in which this process itself stood still, the other one's beats are heard
        first. Silence before the first beat is that of a process that starts.
        """
        beats = int(self._word[0])
        if beats != self._last or beats == 0:
            self._last, self._silent_seconds = beats, 0.0
            return
        self._silent_seconds += waited_seconds
        if self._silent_seconds >= SILENCE_SECONDS:
            raise ConnectionError(f"its process has stood still for {SILENCE_SECONDS} s")
