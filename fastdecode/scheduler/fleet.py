"""The R-workers as the scheduler counts on them."""

from __future__ import annotations

from collections.abc import Iterable


class Fleet:
    """How fast each R-worker is, in any unit, and which take sequences. A worker keeps its index when it is gone."""

    def __init__(self, bandwidths: Iterable[float]) -> None:
        self.bandwidths = list(bandwidths)
        self._draining: set[int] = set()
        self._gone: set[int] = set()

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
        others = sum(self.bandwidths[worker] for worker in self.present)
        self.bandwidths.append(bandwidth)
        return bandwidth / others

    def drain(self, worker: int) -> None:
        """``worker`` takes no more sequences; no effect on one that is gone."""
        if worker not in self._gone:
            self._draining.add(worker)

    def lose(self, worker: int) -> None:
        """``worker`` is gone."""
        self._draining.discard(worker)
        self._gone.add(worker)
