"""The R-workers as the scheduler counts on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fastdecode.scheduler.speeds import WorkerSpeeds


class Fleet:
    """How fast each R-worker is and which take sequences. A worker keeps its index when it is gone.

    ``bandwidths``: what memory gave each at its start, in any unit.
    """

    def __init__(self, bandwidths: Iterable[float]) -> None:
        self.bandwidths = list(bandwidths)
        self._speeds = WorkerSpeeds(self.bandwidths)
        self._draining: set[int] = set()
        self._gone: set[int] = set()

    @property
    def speeds(self) -> np.ndarray:
        """How fast each attends as far as is known, in any unit; float64 [num_workers]."""
        return self._speeds.relative

    @property
    def relative_times(self) -> np.ndarray:
        """What attending takes each beside one of mean speed; float64 [num_workers]."""
        speeds = self.speeds
        return float(speeds.mean()) / np.maximum(speeds, 1e-300)

    def observe(self, kv_loads: Sequence[int], r_seconds: Sequence[float]) -> None:
        """One decode step: KV tokens attended and busy seconds of each."""
        self._speeds.observe(kv_loads, r_seconds)

    @property
    def draining(self) -> list[int]:
        """Those that give up what they hold and then go."""
        return sorted(self._draining)

    @property
    def accepting(self) -> list[int]:
        """Those that take sequences."""
        return [worker for worker in self.present if worker not in self._draining]

    @property
    def present(self) -> list[int]:
        """Those that are not gone."""
        return [worker for worker in range(len(self.bandwidths)) if worker not in self._gone]

    def join(self, bandwidth: float) -> float:
        """One more; returns how fast it is beside all others together."""
        others = self.present
        self.bandwidths.append(bandwidth)
        self._speeds.join(bandwidth)
        return float(self.speeds[-1] / self.speeds[others].sum())

    def drain(self, worker: int) -> None:
        """``worker`` takes no more sequences; no effect on one that is gone."""
        if worker not in self._gone:
            self._draining.add(worker)

    def lose(self, worker: int) -> None:
        """``worker`` is gone."""
        self._draining.discard(worker)
        self._gone.add(worker)
