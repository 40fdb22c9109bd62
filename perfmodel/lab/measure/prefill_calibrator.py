"""Calibration of prefill workers: their speeds, their mutual slowdown, and the best way to cut prompts into parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdecode.perfmodel.calibration import summary
from fastdecode.perfmodel.lab.measure.prefill_runs import PrefillRunner, in_order
from fastdecode.perfmodel.measurements import PrefillPoint
from fastdecode.perfmodel.partition import PartitionEntry, Parts, balanced, searched
from fastdecode.perfmodel.prefill_rates import measured_prefill_model
from fastdecode.perfmodel.profile import HardwareProfile


@dataclass(frozen=True)
class PrefillCalibration:
    """The sizes to measure on prefill workers. ``lengths``: prompts, in tokens, whose times are measured.

    ``table_lengths``: prompts, in tokens, for which the best cut into parts is searched, for each of ``worker_counts``
    above 1. ``rounds``: runs per measured time. ``search_rounds``: runs per cut that a search tries.
    """

    lengths: tuple[int, ...]
    table_lengths: tuple[int, ...]
    worker_counts: tuple[int, ...]
    rounds: int = 3
    search_rounds: int = 1


def calibrate_prefill(
    profile: HardwareProfile,
    runner: PrefillRunner,
    plan: PrefillCalibration,
    advance: Callable[[], object] = lambda: None,
) -> HardwareProfile:
    """Return ``profile`` with the times of ``runner``'s prefill workers, and a table of the best cuts found on them."""
    points = measure_rates(runner, plan.lengths, plan.worker_counts, plan.rounds, advance)
    found = replace(profile, prefill=points, partitions=())
    entries = []
    for count in plan.worker_counts:
        for num_tokens in plan.table_lengths if count > 1 else ():
            entries.append(search_parts(found, runner, num_tokens, count, plan.search_rounds))
            advance()
    return replace(found, partitions=tuple(entries))


def measure_rates(
    runner: PrefillRunner,
    lengths: Sequence[int],
    worker_counts: Sequence[int],
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> tuple[PrefillPoint, ...]:
    """Time a prompt on one worker alone, and one prompt on each of the first n workers at the same time.

    ``worker_counts``: the numbers n. The shortest prompt runs alone on every worker, for their relative speeds.
    """
    points = []
    for num_tokens in sorted(set(lengths)):
        for worker in range(runner.num_workers if num_tokens == min(lengths) else 1):
            runs = [runner.run([in_order((num_tokens,), worker)])[0].seconds for _ in range(rounds)]
            points.append(_point(num_tokens, runs, worker, 1))
            advance()
        for count in sorted({each for each in worker_counts if each > 1}):
            jobs = [in_order((num_tokens,), worker) for worker in range(count)]
            together = [float(np.mean([run.seconds for run in runner.run(jobs)])) for _ in range(rounds)]
            points.append(_point(num_tokens, together, 0, count))
            advance()
    return tuple(points)


def search_parts(
    profile: HardwareProfile, runner: PrefillRunner, num_tokens: int, num_workers: int, rounds: int
) -> PartitionEntry:
    """Search the fastest parts of a prompt on the first ``num_workers`` (KVR-S), starting from predicted ones.

    The time of a partition is the median of ``rounds`` runs.
    """

    def seconds(parts: Parts) -> float:
        return float(np.median([runner.run([in_order(parts)])[0].seconds for _ in range(rounds)]))

    start = balanced(measured_prefill_model(profile, num_workers), num_tokens, num_workers)
    # A search moves the cuts between prefill workers' parts by at least 16 tokens: noise hides the effect of fewer
    least_rows = 16
    # A search moves cuts by 1/32 of the prompt at first and by 1/128 at last. Small moves suffice from a good start
    first_stride, least_stride = 32, 128
    strides = [max(num_tokens // part, least_rows) for part in (least_stride, first_stride)]
    return PartitionEntry(num_tokens, searched(seconds, start, *strides))


def num_measurements(plan: PrefillCalibration, num_workers: int) -> int:
    """Return how often ``calibrate_prefill`` with this ``plan`` calls ``advance``."""
    several = sum(count > 1 for count in set(plan.worker_counts))
    return len(set(plan.lengths)) * (1 + several) + num_workers - 1 + len(plan.table_lengths) * several


def _point(num_tokens: int, seconds: Sequence[float], worker: int, num_busy: int) -> PrefillPoint:
    found = summary(np.array(seconds))
    return PrefillPoint(num_tokens, found.seconds, worker, num_busy, found.spread)
