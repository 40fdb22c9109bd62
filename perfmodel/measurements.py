"""The measurements in a machine's profile. Times are in seconds.

``spread`` is that of the samples behind a figure: from the 10th to the 90th percentile over the median.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.errors import ConfigError

HERE = "here"
"""The R-workers of the S-worker's own machine, in ``RPartPoint.r_worker``: threads and processes alike."""


@dataclass(frozen=True)
class MachineIdentity:
    """The machine whose figures these are."""

    host: str
    s_worker: str
    r_worker: str
    isa: str
    fastdecode_version: str


@dataclass(frozen=True)
class SPartPoint:
    """The S-part of one layer, and of embedding, head and sampling, at one batch size; ``threads`` of the S-worker.

    With more than one rank (``tensor_parallel_size``) the collectives are in both, and ``threads`` are of each.
    """

    batch_size: int
    layer_seconds: float
    head_seconds: float
    spread: float = 0.0
    threads: int = 1
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class RPartPoint:
    """One call of one layer on one R-worker: ``num_sequences`` rows, each over ``context_len`` cached tokens.

    ``r_worker``: "here", or the "host:port" of one elsewhere. ``kind``: "rows"; "absorbing", rows of latents
    with which the R-worker multiplies K and V too; "scan" of an index, which scores all keys and picks; or "state" of a
    recurrent layer, whose groups stand for KV heads and whose values' width for the heads', whatever the context.
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
    kind: str = "rows"

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class LinkPoint:
    """The time from submit to o available, the R-worker's work apart, with ``message_bytes`` of q, k, v and o together.

    ``r_worker``: "inproc", "spawn" or "host:port".
    """

    r_worker: str
    message_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class HostPoint:
    """The engine's own work in a step: scheduling and bookkeeping, and with more ranks than one telling the others."""

    num_sequences: int
    seconds: float
    spread: float = 0.0
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class PlanPoint:
    """Beginning and ending a step on one R-worker, its plan and report on their way included."""

    r_worker: str
    num_sequences: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class ContentionPoint:
    """The slowness of each side while the other works on this machine's other cores, in times.

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
    """The time of one short S shape (``part`` "s") or R shape ("r"): measured again later, it says how fast the machine
    is by then."""

    part: str
    threads: int
    seconds: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class PrefillPoint:
    """From a prompt's arrival to its first token on prefill worker ``worker`` alone, ``num_busy`` of them (the first
    ones) computing such a prompt at the same time."""

    num_tokens: int
    seconds: float
    worker: int = 0
    num_busy: int = 1
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)
        if self.num_tokens < 1 or self.num_busy < 1:
            raise ConfigError(f"a prompt has a token at least, and a worker: {self.num_tokens}, {self.num_busy}")


def _check_seconds(seconds: float) -> None:
    """Rates and drifts are divided by them."""
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, not {seconds!r}: work that was measured took time")
