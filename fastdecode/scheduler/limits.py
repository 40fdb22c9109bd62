"""What a step and the machines allow."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """``max_num_batched_tokens``: token budget of a whole step. ``scratch_tokens``: prompt tokens whose keys and values
    the S-worker can hold. ``num_blocks`` and ``bandwidths``: of each R-worker, KV blocks, and speed in any unit before
    any was observed. ``kv_load_limit``: KV tokens attended per step over all R-workers, None while unknown.
    ``micro_batch_interval``: steps between micro-batches, None for a 32nd of an output. ``balanced_kv_tokens``: what an
    R-worker of mean speed attends in the time of the S-part, where that is known beforehand; without a load limit it
    gives one. ``idle_s_share``: S-part seconds of a step with hardly any row over those of one with all seats taken.
    ``seconds_per_moved_token``: what a cached token takes from one R-worker to another, before any was moved; infinite
    where nothing is to move for evenness."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_mini_batches: int
    scratch_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: tuple[int, ...]
    bandwidths: tuple[float, ...]
    kv_load_limit: int | None = None
    micro_batch_interval: int | None = None
    prefix_caching: bool = True
    balanced_kv_tokens: int | None = None
    idle_s_share: float = 1.0
    seconds_per_moved_token: float = math.inf
