"""The schedules as settings of one admission rule: ours, and those it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Prompts(Enum):
    """How the prompts' tokens share a step with the decodes."""

    UNBOUNDED = "whole, all at once, whatever the token budget"
    FIRST = "in steps of their own, while the decodes wait"
    WHOLE = "beside the decodes, cut only where one alone exceeds the token budget"
    CHUNKED = "beside the decodes, cut to what the token budget leaves"


@dataclass(frozen=True)
class Policy:
    """``waves``: nobody starts before all have ended. ``reserves_longest``: a sequence holds the blocks of the longest
    one from its start, as a contiguous cache must. ``stabilizes_load``: starts are spread so that the KV tokens
    attended per step stay even."""

    prompts: Prompts
    waves: bool = False
    reserves_longest: bool = False
    stabilizes_load: bool = False


POLICIES = {
    "request-level": Policy(Prompts.UNBOUNDED, waves=True, reserves_longest=True),
    "hybrid": Policy(Prompts.UNBOUNDED, reserves_longest=True),
    "prefill-first": Policy(Prompts.FIRST),
    "fcfs": Policy(Prompts.WHOLE),
    "stall-free": Policy(Prompts.CHUNKED),
    "sls": Policy(Prompts.CHUNKED, stabilizes_load=True),
}
"""``request-level``: FasterTransformer. ``hybrid``: Orca, as Sarathi-Serve measured it. ``prefill-first``: vLLM's first
scheduler. ``fcfs``: continuous batching over paged blocks. ``stall-free``: Sarathi-Serve. ``sls``: stall-free, with
FastDecode's sequence-level load-stabilizing schedule."""
