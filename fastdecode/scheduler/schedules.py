"""The schedules as settings of one admission rule, what bounds a step, and how prompts are cut to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from fastdecode.core.step import Chunk
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.place import UNLIMITED


class Prefill(Enum):
    """How the prompts' tokens share a step with the decodes."""

    UNBOUNDED = "whole, all at once, whatever the token budget"
    FIRST = "in steps of their own, while the decodes wait"
    WHOLE = "beside the decodes, cut only where one alone exceeds the token budget"
    CHUNKED = "beside the decodes, cut to what the token budget leaves"


@dataclass(frozen=True)
class Schedule:
    """``waves``: no sequence starts before all have ended. ``reserves_longest``: a sequence holds the blocks of the
    longest one from its start, as a contiguous cache must. ``stabilizes_load``: starts are spread so that the KV
    tokens attended per step stay even."""

    prefill: Prefill
    waves: bool = False
    reserves_longest: bool = False
    stabilizes_load: bool = False


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
    """``max_num_batched_tokens``: token budget of a whole step. ``scratch_tokens``: prompt tokens whose keys and values
    the S-worker can hold. ``num_blocks`` and ``bandwidths``: of each R-worker, KV blocks, and speed in any unit before
    any was observed. ``kv_load_limit``: KV tokens attended per step over all R-workers, None while unknown.
    ``micro_batch_interval``: steps between micro-batches, None for a 32nd of an output. ``balanced_kv_tokens``: what an
    R-worker of mean speed attends in the time of the S-part, where that is known beforehand; without a load limit it
    gives one. ``idle_s_share``: S-part seconds of a step with hardly any row over those of one with all seats taken.
    ``seconds_per_moved_token``: what a cached token takes from one R-worker to another, before any was moved; infinite
    where nothing is to move for evenness. ``range_tokens``: longer sequences lie in ranges of so many tokens, a
    multiple of the block size. ``kv_replicas``: R-workers on which each sequence is cached, 1 or 2. ``hosts``: the
    machine of each R-worker, by any name that tells them apart; empty where that is not known."""

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
    range_tokens: int = UNLIMITED
    kv_replicas: int = 1
    hosts: tuple[str, ...] = ()


MOST_PARTIAL_RESULTS = 2048
"""Rows of a prompt's chunk times the ranges that it attends in. Of every row and head a range answers with float32
numbers, some 17 kB with 32 heads of 128, and an R-worker takes at most 256 MiB of them for a layer."""


class ChunkCutter:
    """Cuts prompts to what a step of ``budget`` rows has left for them."""

    def __init__(self, prefill: Prefill, budget: int, segment_tokens: int = UNLIMITED) -> None:
        """No chunk goes beyond the end of a segment of ``segment_tokens``."""
        self._segment_tokens = segment_tokens
        self.chunks: list[Chunk] = []
        self._prefill = prefill
        self._budget = budget

    def rows_for(self, num_left: int) -> int:
        """Return how many of a prompt's ``num_left`` tokens would go into this step."""
        if self._prefill is Prefill.UNBOUNDED:
            return num_left
        if self._prefill is not Prefill.CHUNKED and num_left > self._budget and self.chunks:
            return 0
        return max(0, min(num_left, self._budget))

    def cut(self, sequence: Sequence) -> None:
        """Put the next tokens of ``sequence``'s prompt into the step, as many as go."""
        if count := self.rows_for(sequence.num_prefill - sequence.num_cached):
            count = min(count, self._segment_tokens - sequence.tail.num_tokens)
            if sequence.num_closed and sequence.attends_in_prompt:
                count = min(count, max(1, MOST_PARTIAL_RESULTS // (1 + sequence.num_closed)))
            self.chunks.append(_chunk(sequence, count))
            self._budget -= count


def _chunk(sequence: Sequence, count: int) -> Chunk:
    """The next ``count`` tokens of ``sequence``'s prompt, attended by the homes of its segments."""
    last, tail = sequence.num_cached + count == sequence.num_prefill, sequence.tail
    closed = sequence.closed if sequence.attends_in_prompt else []
    return Chunk(
        sequence.sequence_id,
        tail.home,
        sequence.num_cached,
        sequence.tokens(sequence.num_cached, count),
        attends=sequence.attends_in_prompt,
        samples=last and sequence.num_prefill == sequence.num_tokens,
        last_of_prompt=last,
        is_decode=False,
        base=tail.start,
        cache_id=tail.cache_id,
        reads=tuple((each.home, each.cache_id, each.start) for each in closed),
        copy=next(iter(tail.workers[1:]), -1),
    )
