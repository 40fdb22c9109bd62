"""What one engine step did and how long each side worked on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastdecode.clock import HOST, MODEL, WAIT
from fastdecode.step import ScheduledStep
from fastdecode.types import StepReport


@dataclass(frozen=True)
class StepRecord:
    """Seconds of one step. ``wall = s + wait + host``.

    ``kv_loads`` (KV tokens attended), ``r_seconds`` and ``transfer_seconds`` are per R-worker.
    ``num_starts``: requests that began in this step for the first time.
    """

    is_decode: bool
    overlapped: bool
    num_tokens: int
    num_output_tokens: int
    kv_loads: tuple[int, ...]
    wall_seconds: float
    s_seconds: float
    wait_seconds: float
    host_seconds: float
    r_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    kv_bytes_read: int
    lost_workers: int = 0
    num_starts: int = 0

    @property
    def kv_load(self) -> int:
        """KV tokens attended over all R-workers."""
        return sum(self.kv_loads)


def step_record(
    step: ScheduledStep, report: StepReport, seconds: dict[str, float], num_output_tokens: int, overlapped: bool
) -> StepRecord:
    """Put together what the scheduler planned, the R-workers reported and the clock counted for one step."""
    return StepRecord(
        is_decode=step.is_decode,
        overlapped=overlapped,
        num_tokens=step.num_tokens,
        num_output_tokens=num_output_tokens,
        kv_loads=tuple(step.kv_loads),
        wall_seconds=sum(seconds.values()),
        s_seconds=seconds[MODEL],
        wait_seconds=seconds[WAIT],
        host_seconds=seconds[HOST],
        r_seconds=tuple(float(np.sum(worker.busy_end - worker.busy_start)) for worker in report.workers),
        transfer_seconds=tuple(worker.transfer_seconds for worker in report.workers),
        kv_bytes_read=sum(worker.bytes_read for worker in report.workers),
        lost_workers=len(report.lost),
        num_starts=step.num_starts,
    )
