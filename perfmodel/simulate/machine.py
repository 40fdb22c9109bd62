"""What a step costs on the machine that is simulated, and which side of it is busy for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastdecode.perfmodel.gpu_only import GpuStepTime
from fastdecode.perfmodel.ranges import NO_RANGES, RangeParts, tail_partials
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.step import ScheduledStep


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step: of the whole, of the S-worker, of the host between steps, of the way to an R-worker and
    back, and of each R-worker's attention (float64 [num_workers])."""

    wall_seconds: float
    s_seconds: float
    host_seconds: float
    transfer_seconds: float
    r_seconds: np.ndarray


class Machine(Protocol):
    """What a step costs. ``kv_bytes_per_token``: of the cache over all layers, 0 where it is not known.
    ``seconds_per_moved_token``: of the cache, from one R-worker to another."""

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def seconds_per_moved_token(self) -> float: ...

    def cost(
        self,
        num_tokens: int,
        num_output_tokens: int,
        kv_loads: Sequence[float],
        ranges: RangeParts = NO_RANGES,
        copied_rows: int = 0,
    ) -> StepCost:
        """Of a step with ``num_tokens`` rows on the S-worker, logits wanted of ``num_output_tokens``; each R-worker
        attends its part of ``kv_loads``. ``ranges``: of sequences with several. ``copied_rows``: those that a second
        R-worker stores too."""
        ...


def copied_rows(step: ScheduledStep) -> int:
    """Rows that a second R-worker stores too."""
    return sum(int(each.chunks["num_rows"][each.chunks["copy"] >= 0].sum()) for each in step.mini_batches)


def range_parts(step: ScheduledStep) -> RangeParts:
    """What its sequences with several ranges ask and are answered; ``kv_loads`` has what they read."""
    reads = tails = 0
    for mini_batch in step.mini_batches:
        chunks = mini_batch.chunks
        reads += int(chunks["num_rows"][mini_batch.reads["chunk"]].sum())
        for chunk in chunks[chunks["attends"] & (chunks["base"] > 0)] if len(mini_batch.reads) else ():
            local = int(chunk["context_len"] - chunk["base"] + chunk["num_rows"])
            tails += int(chunk["num_rows"]) * tail_partials(local)
    return RangeParts(reads, reads + tails)


@dataclass(frozen=True)
class SplitMachine:
    """FastDecode: an S-worker and R-workers. A step waits for the busiest of these, whatever the others do.

    ``speeds``: of each R-worker, in any unit; the model's is their mean. None: all are equal.
    """

    model: StepModel
    kv_bytes_per_token: int = 0
    speeds: tuple[float, ...] | None = None
    seconds_per_moved_token: float = 0.0

    def cost(
        self,
        num_tokens: int,
        num_output_tokens: int,
        kv_loads: Sequence[float],
        ranges: RangeParts = NO_RANGES,
        copied_rows: int = 0,
    ) -> StepCost:
        """By the model, as if every R-worker were as fast as the mean and had the busiest one's load."""
        model = self.model
        loads = np.asarray(kv_loads, np.float64)
        if self.speeds is not None:
            loads = loads * np.mean(self.speeds) / self.speeds
        as_busiest = model.num_r_workers * float(loads.max())
        of_step = num_tokens, as_busiest, num_output_tokens, ranges, copied_rows
        stages, k = model.stages(*of_step), model.num_mini_batches
        calls = model.num_layers * k
        fixed = model.r_part.seconds(0, (num_output_tokens + ranges.num_reads) / k / model.num_r_workers)
        storing = model.copy_costs.append_seconds * copied_rows / k / model.num_r_workers
        attending = fixed * (loads > 0) + storing + model.r_part.seconds_per_token * loads / k
        return StepCost(
            wall_seconds=model(*of_step),
            s_seconds=calls * stages.s_part + k * model.s_part.head_seconds(num_output_tokens / k),
            host_seconds=model.host_seconds(num_output_tokens),
            transfer_seconds=calls * stages.trip,
            r_seconds=calls * attending,
        )


@dataclass(frozen=True)
class GpuMachine:
    """A GPU alone: its memory holds the cache, and its attention adds to the step. One "R-worker" is that attention."""

    step_time: GpuStepTime
    seconds_per_moved_token: float = 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the cache over all layers."""
        return self.step_time.kv_bytes_per_token

    def cost(
        self,
        num_tokens: int,
        num_output_tokens: int,
        kv_loads: Sequence[float],
        ranges: RangeParts = NO_RANGES,
        copied_rows: int = 0,
    ) -> StepCost:
        """By the roofline; S is what weights and arithmetic take. Nothing is in several ``ranges`` there, or copied."""
        kv_tokens = sum(kv_loads)
        wall, s_part = (self.step_time(num_tokens, tokens, num_output_tokens) for tokens in (kv_tokens, 0))
        return StepCost(wall, s_part, 0.0, 0.0, np.array([wall - s_part]))
