"""What was measured of a machine, point by point; times in seconds.

``spread`` is that of the samples behind a figure: from the 10th to the 90th percentile over the median.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.errors import ConfigError

HERE = "here"
"""The R-workers of the S-worker's own machine, in ``RPartPoint.r_worker``: threads and processes alike."""


@dataclass(frozen=True)
class MachineIdentity:
    """Whose figures these are."""

    host: str
    s_worker: str
    r_worker: str
    isa: str
    fastdecode_version: str


@dataclass(frozen=True)
class SPartPoint:
    """The S-part of one layer, and of embedding, head and sampling, at one batch size; ``threads`` of the S-worker."""

    batch_size: int
    layer_seconds: float
    head_seconds: float
    spread: float = 0.0
    threads: int = 1


@dataclass(frozen=True)
class RPartPoint:
    """One call of one layer on one R-worker: ``num_sequences`` rows, each over ``context_len`` cached tokens.

    ``r_worker``: "here", or the "host:port" of one elsewhere.
    """

    kv_cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    threads: int
    num_sequences: int
    context_len: int
    seconds: float
    spread: float = 0.0
    r_worker: str = HERE

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class LinkPoint:
    """From submit to o available, the R-worker's own work apart, with ``message_bytes`` of q, k, v and o together.

    ``r_worker``: "inproc", "spawn" or "host:port".
    """

    r_worker: str
    message_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class HostPoint:
    """The engine's own work in a step: scheduling and bookkeeping."""

    num_sequences: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class PlanPoint:
    """Beginning and ending a step on one R-worker, its plan and report on their way included."""

    r_worker: str
    num_sequences: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class ContentionPoint:
    """How many times longer each side takes while the other works on this machine's other cores.

    ``num_kv_heads``: of the cache that the R-worker reads; the more it reads, the more it takes from S.
    """

    s_threads: int
    r_threads: int
    s_slowdown: float
    r_slowdown: float
    spread: float = 0.0
    num_kv_heads: int = 1


@dataclass(frozen=True)
class AnchorPoint:
    """What one short S shape (``part`` "s") or R shape ("r") took: measured again later, it says how fast the machine
    is by then."""

    part: str
    threads: int
    seconds: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


def _check_seconds(seconds: float) -> None:
    """Rates and drifts are divided by them."""
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, not {seconds!r}: work that was measured took time")
