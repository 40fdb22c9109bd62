"""The profile of a machine: measurements that a plan uses instead of presets. Times are in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fastdecode.core.errors import ProfileError
from fastdecode.perfmodel.calibration import fit_parts
from fastdecode.perfmodel.measurements import (
    HERE,
    AnchorPoint,
    ContentionPoint,
    HostPoint,
    LinkPoint,
    MachineIdentity,
    PlanPoint,
    PrefillPoint,
    RPartPoint,
    SPartPoint,
)
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.partition import PartitionEntry
from fastdecode.perfmodel.rank_costs import rank_shape
from fastdecode.perfmodel.stages import Contention, MeasuredSPart, RPart, Transport

MEASURED_BY_ALL = (
    "`fastdecode calibrate` without --quick measures every KV dtype, KV heads in groups of 1, 4 and 8, and half and "
    "all of the cores"
)
"""Text for errors: how to complete a profile that ``calibrate --quick`` made."""

MEASURED_FOR_RANKS = "`fastdecode calibrate --tensor-parallel-size {}` measures them"

MEAN_CONTEXT = 1024
"""Context in tokens at which the times of rows are compared; within the measured range."""

FORMAT_VERSION = 3
"""Version of the JSON. Version 1 has no prefill workers, and version 2 no ranks; both can still be read."""


@dataclass(frozen=True)
class HardwareProfile:
    """A machine's S-worker, R-workers and links, calibrated for one model's layers.

    Its methods raise ProfileError for a measurement that the profile lacks.
    """

    machine: MachineIdentity
    shape: ModelShape
    s_part: tuple[SPartPoint, ...]
    r_part: tuple[RPartPoint, ...]
    links: tuple[LinkPoint, ...] = ()
    host: tuple[HostPoint, ...] = ()
    plans: tuple[PlanPoint, ...] = ()
    contention: tuple[ContentionPoint, ...] = ()
    anchors: tuple[AnchorPoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    partitions: tuple[PartitionEntry, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def measured_rank_counts(self) -> set[int]:
        """The numbers of S-worker ranks for which the profile has a measured S-part."""
        return {point.tensor_parallel_size for point in self.s_part}

    def measured_s_part(
        self, threads: int | None = None, shape: ModelShape | None = None, num_ranks: int = 1
    ) -> MeasuredSPart:
        """Return the measured S-part T(B) at ``threads`` per rank, for the layers of ``shape`` (None: the profile's).

        ``threads``: None for the most that were measured. ``shape`` may have other KV heads. Times are scaled by
        the number of the layers' parameters.
        """
        of_ranks = [point for point in self.s_part if point.tensor_parallel_size == num_ranks]
        if self.s_part and not of_ranks:
            cure = MEASURED_FOR_RANKS.format(num_ranks)
            raise self.lacks(f"no S-part of {num_ranks} rank(s)", sorted(self.measured_rank_counts), cure)
        measured = sorted({point.threads for point in of_ranks})
        threads = threads or (measured[-1] if measured else 1)
        points = sorted((p for p in of_ranks if p.threads == threads), key=lambda point: point.batch_size)
        if measured and not points:
            raise self.lacks(f"no S-part with {threads} thread(s)", measured)
        factor = (shape or self.shape).active_layer_parameters / self.shape.active_layer_parameters
        return MeasuredSPart(
            tuple(point.batch_size for point in points),
            tuple(factor * point.layer_seconds for point in points),
            tuple(point.head_seconds for point in points),
        )

    def measured_r_part(
        self,
        kv_dtype: str,
        threads: int | None = None,
        shape: ModelShape | None = None,
        r_worker: str | None = None,
        num_ranks: int = 1,
    ) -> RPart:
        """Return the measured R-part with ``threads`` (None: most measured) and ``kv_dtype``, for ``shape``'s heads.

        The slowest measured R-worker counts unless ``r_worker`` names one. An R-worker with the heads of one of
        ``num_ranks`` takes a share of the time per token and row, but the whole time per call. Each rank reads latent
        rows whole, so a measurement with the rank's number of heads is needed.
        """
        shape = shape or self.shape
        own = rank_shape(shape, num_ranks)
        if num_ranks > 1 and not shape.latent:
            whole, share = (
                self.measured_r_part(kv_dtype, threads, shape, r_worker),
                own.num_kv_heads / shape.num_kv_heads,
            )
            return RPart(share * whole.seconds_per_token, whole.call_seconds, share * whole.row_seconds)
        shape = own
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        kind = "absorbing" if shape.latent and shape.latent.at_r_workers else "rows"
        alike = self._r_points(kind, kv_dtype, r_worker)
        points = [p for p in alike if (p.num_heads, p.num_kv_heads, p.head_dim) == heads]
        if not points:
            found = sorted({f"{p.kv_cache_dtype} with {p.num_heads} / {p.num_kv_heads} heads" for p in self.r_part})
            where = "" if r_worker in (None, HERE) else f" of {r_worker}"
            raise self.lacks(
                f"no R-part{where} for {kv_dtype} with {heads[0]} / {heads[1]} heads of {heads[2]}", found,
                MEASURED_FOR_RANKS.format(num_ranks) if num_ranks > 1 else MEASURED_BY_ALL,
            )  # fmt: skip
        if threads is not None and threads not in (measured := sorted({point.threads for point in points})):
            raise self.lacks(f"no R-part with {threads} thread(s)", measured)
        found_parts = [_fit_r_part(points, name, threads) for name in sorted({point.r_worker for point in points})]
        return max(found_parts, key=lambda part: part.seconds_per_token)

    def absorbs_sooner_at_r_workers(
        self, shape: ModelShape, kv_dtype: str, rows: float, r_workers: Iterable[str]
    ) -> bool:
        """Return whether ``rows`` rows of a latent layer return sooner if R-workers, not the S-worker, absorb K and V.

        Each row attends to MEAN_CONTEXT tokens. The compared times are of the slowest link to ``r_workers``, and of
        attention. Return False if the profile lacks attention with either side absorbing.
        """
        seconds = []
        for each in (shape.absorbing(False), shape.absorbing(True)):
            try:
                part = self.measured_r_part(kv_dtype, shape=each)
            except ProfileError:
                return False
            ways = [self.transport(name, each.attending_row_bytes) for name in r_workers]
            seconds.append(max(way.trip_seconds(rows) for way in ways) + part.seconds(rows * MEAN_CONTEXT, rows))
        return seconds[1] < seconds[0]

    def measured_scan(self, kv_dtype: str, threads: int | None = None, r_worker: str | None = None) -> RPart:
        """Return the times to scan all keys of the model's index; arguments as in ``measured_r_part``."""
        points = self._r_points("scan", kv_dtype, r_worker)
        if not points:
            raise self.lacks(f"no scan of an index over a {kv_dtype} cache", [])
        found = [_fit_r_part(points, name, threads) for name in sorted({point.r_worker for point in points})]
        return max(found, key=lambda part: part.seconds_per_token)

    def measured_state(
        self, kv_dtype: str, threads: int | None = None, r_worker: str | None = None
    ) -> tuple[float, float]:
        """Return the seconds of a recurrent layer's call, and of each sequence's state in it, on the slowest R-worker.

        Raise ProfileError if no recurrent layer was measured.
        """
        points = self._r_points("state", kv_dtype, r_worker)
        points = [point for point in points if point.threads == (threads or max(each.threads for each in points))]
        if not points:
            raise self.lacks(f"no state of a recurrent layer beside a {kv_dtype} cache", [])
        names = sorted({point.r_worker for point in points})
        found = []
        for name in names:
            own = [point for point in points if point.r_worker == name]
            columns = np.array([(p.num_sequences, 1.0) for p in own])
            found.append(fit_parts(columns, np.array([p.seconds for p in own])).tolist())
        per_row, per_call = max(found)
        return per_call, per_row

    def _r_points(self, kind: str, kv_dtype: str, r_worker: str | None) -> list[RPartPoint]:
        of_kind = [point for point in self.r_part if point.kind == kind and point.kv_cache_dtype == kv_dtype]
        return [point for point in of_kind if r_worker in (None, point.r_worker)]

    def transport(self, r_worker: str | None = None, row_bytes: float = 0.0) -> Transport:
        """Return the link to ``r_worker`` and back (None: the slowest). A link that was not measured costs no time."""
        names = {point.r_worker for point in self.links} if r_worker is None else {r_worker}
        ways = [self._way(name, row_bytes) for name in sorted(names)]
        return max(ways, key=lambda way: way.trip_seconds(64), default=Transport(row_bytes))

    def step_overhead_seconds(
        self, r_worker: str | None = None, num_r_workers: int = 1, num_ranks: int = 1
    ) -> tuple[float, float]:
        """Return the host seconds of a step: once, and per row, for ``num_r_workers`` per rank.

        The figures are those of one rank if ``num_ranks`` were not measured.
        """
        known = num_ranks if any(p.tensor_parallel_size == num_ranks for p in self.host) else 1
        own = [(p.num_sequences, p.seconds) for p in self.host if p.tensor_parallel_size == known]
        per_step, per_row = _fixed_and_per_row(own)
        names = {point.r_worker for point in self.plans} if r_worker is None else {r_worker}
        plans = [
            _fixed_and_per_row([(p.num_sequences, p.seconds) for p in self.plans if p.r_worker == n]) for n in names
        ]
        plan_step, plan_row = max(plans, key=lambda plan: plan[0] + 64 * plan[1], default=(0.0, 0.0))
        return per_step + num_r_workers * plan_step, per_row + plan_row

    def measured_contention(self, s_threads: int, r_threads: int, num_kv_heads: int) -> Contention:
        """Return how much S-worker and R-workers on separate cores slow each other down; 1 if that was not measured.
        The measurement with the nearest numbers of threads counts, and among several, the one with the nearest KV
        heads.
        """
        if not self.contention:
            return Contention()
        nearest = min(
            self.contention,
            key=lambda point: (
                abs(point.s_threads - s_threads) + abs(point.r_threads - r_threads),
                abs(point.num_kv_heads - num_kv_heads),
            ),
        )
        return Contention(nearest.s_slowdown, nearest.r_slowdown)

    def anchor_seconds(self, part: str, threads: int) -> float:
        """Return the recorded seconds of the anchor for the S-part (``part`` "s") or the R-part ("r")."""
        for point in self.anchors:
            if (point.part, point.threads) == (part, threads):
                return point.seconds
        raise self.lacks(f"no anchor {part!r} with {threads} thread(s)", [(p.part, p.threads) for p in self.anchors])

    def _way(self, r_worker: str, row_bytes: float) -> Transport:
        points = [point for point in self.links if point.r_worker == r_worker]
        if not points:
            return Transport(row_bytes)
        columns = np.array([(1.0, point.message_bytes) for point in points])
        latency, per_byte = fit_parts(columns, np.array([max(point.seconds, 1e-9) for point in points])).tolist()
        return Transport(row_bytes, (1.0 / per_byte,) if per_byte else (), latency)

    def lacks(self, what: str, found: list, cure: str = MEASURED_BY_ALL) -> ProfileError:
        """Return an error that says what the profile lacks, what it has, and how to measure the rest (``cure``)."""
        return ProfileError(
            f"the profile of {self.machine.host} has {what}; it has {', '.join(map(str, found)) or 'none'}: {cure}"
        )


def _fit_r_part(points: list[RPartPoint], r_worker: str, threads: int | None) -> RPart:
    """Fit the seconds per token, per row and per call of ``r_worker`` with ``threads`` threads to ``points``."""
    own = [point for point in points if point.r_worker == r_worker]
    threads = threads or max(point.threads for point in own)
    own = [point for point in own if point.threads == threads]
    columns = np.array([(p.num_sequences * p.context_len, p.num_sequences, 1.0) for p in own])
    per_token, per_row, per_call = fit_parts(columns, np.array([point.seconds for point in own])).tolist()
    return RPart(per_token, per_call, per_row)


def _fixed_and_per_row(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Fit (rows, seconds) ``points`` by a line; return its fixed seconds and its seconds per row."""
    if not points:
        return 0.0, 0.0
    columns = np.array([(1.0, rows) for rows, _ in points])
    fixed, per_row = fit_parts(columns, np.array([max(seconds, 1e-9) for _, seconds in points])).tolist()
    return fixed, per_row
