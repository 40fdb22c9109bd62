"""Schedules, given as settings of one scheduler; the limits of a scheduler; and how prompts are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from fastdecode.core.placing import UNLIMITED, WHOLE, Placing
from fastdecode.scheduler.sequence import Sizes


class Prefill(Enum):
    """How prompt tokens share steps with decodes, and how prompts are cut."""

    UNBOUNDED = "whole, all at once, whatever the token budget"
    FIRST = "in steps of their own, while the decodes wait"
    WHOLE = "beside the decodes, cut only where one alone exceeds the token budget"
    CHUNKED = "beside the decodes, cut to what the token budget leaves"


@dataclass(frozen=True)
class Schedule:
    """The settings that define a schedule.
    ``waves``: no sequence starts before all running ones have ended. ``reserves_longest``: each sequence reserves, at
    its start, as many blocks as the longest possible sequence needs, as in a contiguous cache. ``stabilizes_load``:
    starts are spread so that the KV tokens attended per step stay even.
    """

    prefill: Prefill
    waves: bool = False
    reserves_longest: bool = False
    stabilizes_load: bool = False


MOVED_BYTES_PER_SECOND = 0.5e9
"""Bytes per second assumed for moving a KV cache between R-workers, before a first move was timed.

Export runs at 1.1 to 1.8 GB/s, import at 1.0 to 1.4 (docs/performance.md), and the data passes through the S-worker.
"""

SCHEDULES = {
    "request-level": Schedule(Prefill.UNBOUNDED, waves=True, reserves_longest=True),
    "hybrid": Schedule(Prefill.UNBOUNDED, reserves_longest=True),
    "prefill-first": Schedule(Prefill.FIRST),
    "fcfs": Schedule(Prefill.WHOLE),
    "stall-free": Schedule(Prefill.CHUNKED),
    "sls": Schedule(Prefill.CHUNKED, stabilizes_load=True),
}
"""``request-level``: FasterTransformer. ``hybrid``: Orca, as Sarathi-Serve measured it. ``prefill-first``: vLLM's first
scheduler. ``fcfs``: continuous batching over paged blocks. ``stall-free``: Sarathi-Serve. ``sls``: stall-free, with
FastDecode's sequence-level load-stabilizing schedule."""


@dataclass(frozen=True)
class Limits:
    """The limits of a scheduler.

    ``max_num_batched_tokens``: token budget of a whole step. ``scratch_tokens``: prompt tokens whose keys and values
    the S-worker can hold. ``num_blocks``, ``bandwidths``: KV blocks of each R-worker, and its initial speed in any
    unit. ``kv_load_limit``: KV tokens attended per step over all R-workers; None while unknown.
    ``micro_batch_interval``: steps between micro-batches; None for a 32nd of an output. ``balanced_kv_tokens``: the KV
    tokens that an R-worker of mean speed attends while the S-worker computes a step, if known; they imply a load limit.
    ``idle_s_share``: the S-worker's time for an almost empty step divided by that for a full one.
    ``seconds_per_moved_token``: initial price of moving a cached token; infinite forbids moves for balance. ``hosts``:
    the machine of each R-worker by any unique name; empty if unknown. ``state_blocks``: blocks per sequence for a
    hybrid model's recurrent states; 1 if the S-worker keeps the states. ``kept_states``: most states kept for prefixes.
    ``state_worth_blocks``: how many blocks of tokens take the memory of one state.
    """

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
    num_speculative_tokens: int = 0
    placing: Placing = WHOLE
    hosts: tuple[str, ...] = ()
    state_blocks: int = 0
    kept_states: int = UNLIMITED
    state_worth_blocks: int = 0

    @property
    def sizes(self) -> Sizes:
        """The rules that count how many blocks a sequence takes in an R-worker's cache."""
        return Sizes(self.block_size, self.state_blocks, self.state_worth_blocks)
