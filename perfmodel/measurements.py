"""The measurements in a machine's profile. Times are in seconds.

``spread``: the range of a figure's samples from the 10th to the 90th percentile, divided by the median.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.errors import ConfigError

HERE = "here"
"""The value of ``RPartPoint.r_worker`` for R-workers on the S-worker's machine, threads and processes alike."""


@dataclass(frozen=True)
class MachineIdentity:
    """The machine, and the version of FastDecode, on which a profile was measured."""

    host: str
    s_worker: str
    r_worker: str
    isa: str
    fastdecode_version: str


@dataclass(frozen=True)
class SPartPoint:
    """The S-part of one layer, and of embedding, head and sampling, at one batch size with ``threads`` threads.

    With several ranks (``tensor_parallel_size``), both times include the collectives, and ``threads`` are per rank.
    """

    batch_size: int
    layer_seconds: float
    head_seconds: float
    spread: float = 0.0
    threads: int = 1
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class RPartPoint:
    """One call of one layer on one R-worker: ``num_sequences`` rows over ``context_len`` cached tokens each.

    ``r_worker``: "here", or the "host:port" of a remote one. ``kind``: "rows"; "absorbing", rows of latents that the
    R-worker also multiplies with K and V; "scan" of an index, which scores all keys and selects some; or "state" of a
    recurrent layer at any context, with its groups as KV heads and its value width as head size.
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
    """The time from submit to o without the R-worker's work, for ``message_bytes`` of q, k, v and o together.

    ``r_worker``: "inproc", "spawn" or "host:port".
    """

    r_worker: str
    message_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class HostPoint:
    """The time of the engine's own work in a step: scheduling, bookkeeping, and messages to several ranks."""

    num_sequences: int
    seconds: float
    spread: float = 0.0
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class PlanPoint:
    """The time to begin and end a step on one R-worker, with sending the step's plan and receiving its report."""

    r_worker: str
    num_sequences: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class ContentionPoint:
    """The factor by which each side is slower while the other works on this machine's other cores.

    ``num_kv_heads``: of the cache that the R-worker reads. An R-worker that reads more slows the S-worker more.
    """

    s_threads: int
    r_threads: int
    s_slowdown: float
    r_slowdown: float
    spread: float = 0.0
    num_kv_heads: int = 1


@dataclass(frozen=True)
class AnchorPoint:
    """The time of a short call of the S-worker (``part`` "s") or an R-worker ("r"), which shows the machine's speed.

    The same call, measured later, tells the machine's speed at that time.
    """

    part: str
    threads: int
    seconds: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class PrefillPoint:
    """The time from a prompt's arrival to its first token if prefill worker ``worker`` computes the whole prompt.

    ``num_busy``: how many workers, ``worker`` included, each compute such a prompt at the same time.
    """

    num_tokens: int
    seconds: float
    worker: int = 0
    num_busy: int = 1
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)
        if self.num_tokens < 1 or self.num_busy < 1:
            raise ConfigError(f"num_tokens and num_busy must be at least 1, not {self.num_tokens} and {self.num_busy}")


def _check_seconds(seconds: float) -> None:
    """Raise ProfileError unless ``seconds`` is finite and above 0, since rates and drifts divide by it."""
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, not {seconds!r}: work that was measured took time")
