"""How many R-workers for this model, GPU and workload, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """What one number of R-workers gives; ``s_busy`` and ``r_busy`` are fractions of the step."""

    num_r_workers: int
    num_hosts: int
    step_seconds: float
    output_tokens_per_second: float
    sequence_seconds: float
    s_busy: float
    r_busy: float
    bottleneck: str
    fits_memory: bool
    price_per_million_tokens: float | None


@dataclass(frozen=True)
class Plan:
    """The answer, with the names of the JSON contract.

    ``num_r_workers_exact``: by equation 11, unrounded; ``num_r_workers`` is more where memory needs more
    (``r_workers_set_by``). ``micro_batch_size`` sequences start every ``interval_steps`` steps, which keeps the load
    below ``kv_load_limit`` cached tokens over all R-workers. ``r_worker_bandwidth_gb_per_s``: KV read by one R-worker.
    """

    mini_batch_size: int
    in_flight: int
    num_mini_batches: int
    num_r_workers: int
    num_r_workers_exact: float
    r_workers_set_by: str
    num_hosts: int
    micro_batch_size: int
    interval_steps: int
    kv_load_limit: int
    step_seconds: float
    output_tokens_per_second: float
    sequence_seconds: float
    bottleneck: str
    s_busy: float
    r_busy: float
    price_per_million_tokens: float | None
    kv_bytes_per_token: int | None
    r_worker_bandwidth_gb_per_s: float | None
    candidates: tuple[Candidate, ...]
