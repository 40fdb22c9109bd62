"""Hops between the S-worker and R-workers, and how the two sides slow each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.core.errors import ConfigError


@dataclass(frozen=True)
class Transport:
    """The hops between S-worker and R-workers, such as PCIe and the network, one after the other.

    ``row_bytes``: q, k, v and o of one row and layer, both directions together, as the paper counts them.
    ``hop_bytes_per_second``: of each hop; none means that nothing is counted. ``latency_seconds``: of one round trip.
    ``overlapped``: the hops work while S and R do; otherwise the slower of the two waits for them in addition.
    """

    row_bytes: float = 0.0
    hop_bytes_per_second: tuple[float, ...] = ()
    latency_seconds: float = 0.0
    overlapped: bool = True

    def __post_init__(self) -> None:
        if self.row_bytes < 0 or self.latency_seconds < 0 or any(not rate > 0 for rate in self.hop_bytes_per_second):
            raise ConfigError("a link must have a bandwidth above zero, and rows and latencies none below")

    def of_layers(self, share: float) -> Transport:
        """Return this way for the mean layer where ``share`` of the layers take it; ``row_bytes`` are the mean's."""
        return replace(self, latency_seconds=share * self.latency_seconds)

    def trip_seconds(self, rows: float, more_bytes: float = 0.0, last_bytes: float = 0.0) -> float:
        """Return the seconds from submit to o for ``rows`` rows of one layer, the R-part apart: all hops in turn.

        ``more_bytes`` go over every hop, ``last_bytes`` over the last one alone, which ends at the R-workers.
        """
        return self.latency_seconds + sum(self._hop_seconds(rows * self.row_bytes + more_bytes, last_bytes))

    def stage_seconds(self, rows: float, more_bytes: float = 0.0, last_bytes: float = 0.0) -> float:
        """Return how long the slowest hop is busy with ``rows`` rows of one layer: it bounds an overlapped pipeline."""
        return max(self._hop_seconds(rows * self.row_bytes + more_bytes, last_bytes), default=0.0)

    def _hop_seconds(self, num_bytes: float, last_bytes: float) -> list[float]:
        seconds = [num_bytes / rate for rate in self.hop_bytes_per_second]
        if seconds:
            seconds[-1] += last_bytes / self.hop_bytes_per_second[-1]
        return seconds


@dataclass(frozen=True)
class Contention:
    """The slowness of each side while the other works too, in times; 1 where they share nothing.

    Two sides that share every core in turn have 2 and 2: then :meth:`together` is the sum.
    """

    s_slowdown: float = 1.0
    r_slowdown: float = 1.0

    def __post_init__(self) -> None:
        if self.s_slowdown < 1 or self.r_slowdown < 1:
            raise ConfigError(
                f"a neighbour makes neither side faster: slowdowns must be at least 1, not {self.s_slowdown:g} and "
                f"{self.r_slowdown:g}"
            )

    def together(self, s_seconds: float, r_seconds: float) -> float:
        """Return the seconds until both are done, started at once, that alone take ``s_seconds`` and ``r_seconds``.

        Both are slow until the first is done; what is left of the other then goes on alone.
        """
        s_slow, r_slow = s_seconds * self.s_slowdown, r_seconds * self.r_slowdown
        if s_slow <= r_slow:
            return s_slow + r_seconds - s_slow / self.r_slowdown
        return r_slow + s_seconds - r_slow / self.s_slowdown


NO_CONTENTION = Contention()

SHARED = Contention(2.0, 2.0)
"""S and R on the very same cores: what one does, the other cannot."""
