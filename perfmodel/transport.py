"""q, k, v to the R-workers and o back: what crosses the wires between S and R."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.errors import ConfigError

MOVED_BYTES_PER_SECOND = 0.5e9
"""Of a sequence's cache from one R-worker to another, until the first was timed: export at 1.1 to 1.8 GB/s, then import
at 1.0 to 1.4 (docs/performance.md), and the way over the S-worker between them."""


@dataclass(frozen=True)
class Transport:
    """The hops between S-worker and R-workers, such as PCIe and the network, one after the other.

    ``row_bytes``: q, k, v and o of one row and layer, both directions together, as the paper counts them.
    ``hop_bytes_per_second``: of each hop; none means that nothing is counted. ``latency_seconds``: of one round trip.
    ``overlapped``: the hops work while S and R do; otherwise whoever is slower waits for them in addition.
    """

    row_bytes: float = 0.0
    hop_bytes_per_second: tuple[float, ...] = ()
    latency_seconds: float = 0.0
    overlapped: bool = True

    def __post_init__(self) -> None:
        if self.row_bytes < 0 or self.latency_seconds < 0 or any(not rate > 0 for rate in self.hop_bytes_per_second):
            raise ConfigError("a link must have a bandwidth above zero, and rows and latencies none below")

    def trip_seconds(self, rows: float) -> float:
        """From submit to o available for ``rows`` rows of one layer, the R-part itself apart: all hops in turn."""
        return self.latency_seconds + sum(rows * self.row_bytes / rate for rate in self.hop_bytes_per_second)

    def stage_seconds(self, rows: float) -> float:
        """How long the slowest hop is busy with ``rows`` rows of one layer: it bounds an overlapped pipeline."""
        return max((rows * self.row_bytes / rate for rate in self.hop_bytes_per_second), default=0.0)
