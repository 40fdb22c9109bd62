"""Machines of known speed: the paper's profile, and a plain one for the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.simulate import StepCost
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.measurements import (
    AnchorPoint,
    ContentionPoint,
    HostPoint,
    LinkPoint,
    MachineIdentity,
    PlanPoint,
    RPartPoint,
    SPartPoint,
)
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.scheduler import Limits

LIMITS = Limits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    num_mini_batches=2,
    scratch_tokens=1 << 40,
    max_model_len=64,
    block_size=16,
    num_blocks=(100, 100),
    bandwidths=(1.0, 1.0),
    prefix_caching=False,
)


@dataclass(frozen=True)
class PlainMachine:
    """A machine with fixed seconds per step, per row and per KV token."""

    per_step: float = 1.0
    per_row: float = 0.0
    per_kv_token: float = 0.0
    kv_bytes_per_token: int = 0
    seconds_per_moved_token: float = 0.0

    def cost(self, load: Load, kv_loads: Sequence[float]) -> StepCost:
        s_part = self.per_step + load.rows * self.per_row
        attention = sum(kv_loads) * self.per_kv_token
        return StepCost(s_part + attention, s_part, 0.0, 0.0, np.full(len(kv_loads), attention))

    def changed(self, places: Sequence[int], factors: Mapping[int, float]) -> PlainMachine:
        return self


def r_point(sequences: int, context: int, seconds: float, **other: Any) -> RPartPoint:
    """Return a measured point of an R-worker with 32 threads."""
    heads = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "threads": 32}
    return RPartPoint("float16", num_sequences=sequences, context_len=context, seconds=seconds, **heads | other)


def profile() -> HardwareProfile:
    """Return the paper's machine as calibrate would write it: 0.1239 µs per token and 20 µs per call."""
    return HardwareProfile(
        machine=MachineIdentity("cluster", "NVIDIA A10", "Epyc 7452", "avx2", "0.1.0"),
        shape=BUILT_IN["llama-7b"],
        s_part=(SPartPoint(1024, 7.08e-3, 1e-3, 0.02), SPartPoint(1, 1.46e-3, 1e-3)),
        r_part=(
            r_point(1024, 256, 1.239e-7 * 1024 * 256 + 2e-5),
            r_point(16, 4096, 1.239e-7 * 16 * 4096 + 2e-5),
            r_point(16, 128, 1.239e-7 * 16 * 128 + 2e-5),
        ),
        links=(
            LinkPoint("r0", 1_000_000, 2e-5 + 1e6 / 12.5e9),
            LinkPoint("r0", 10_000_000, 2e-5 + 1e7 / 12.5e9),
            LinkPoint("r1", 1_000_000, 3e-5 + 1e6 / 10e9),
            LinkPoint("r1", 10_000_000, 3e-5 + 1e7 / 10e9),
        ),
        host=(HostPoint(1, 1.001e-3), HostPoint(1000, 2e-3)),
        plans=(PlanPoint("r0", 10, 1e-4), PlanPoint("r0", 1000, 1e-4)),
        contention=(ContentionPoint(1, 1, 1.5, 1.25),),
        anchors=(AnchorPoint("s", 1, 5e-3), AnchorPoint("r", 32, 6e-3)),
    )
