"""Calibrates tensor-parallel ranks that share this machine, and lists configurations of ranks to validate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ProfileError
from fastdecode.core.machine import usable_cores
from fastdecode.perfmodel.calibration import Anchor, Measured, steadily
from fastdecode.perfmodel.deployment import Deployment
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig, InstantBackend
from fastdecode.perfmodel.lab.measure.samples import (
    FEW_LAYERS,
    MANY_LAYERS,
    SAMPLE_STEPS,
    SHORT_CONTEXT,
    measuring,
    s_anchor_seconds,
    with_layers,
)
from fastdecode.perfmodel.lab.measure.validation import KV_DTYPES, SIZES, Configuration, kv_head_counts
from fastdecode.perfmodel.measurements import HostPoint, SPartPoint
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.profile import HardwareProfile

LAYERS = (MANY_LAYERS, FEW_LAYERS)


@dataclass(frozen=True)
class RankCalibration:
    """The sizes that a calibration of ``num_ranks`` tensor-parallel ranks measures.

    ``rounds``: samples of SAMPLE_STEPS steps per batch size, taken again up to ``most_tries`` times while the machine's
    speed changes. One rank's S-part on ``anchor_threads`` threads, timed before and after, shows that speed.
    ``num_engines``: engines started for each number of layers in LAYERS.
    """

    num_ranks: int
    batch_sizes: tuple[int, ...]
    anchor_threads: int
    rounds: int
    most_tries: int
    num_engines: int = 2

    @property
    def num_measurements(self) -> int:
        """The number of measurements, each one tick of the progress bar."""
        return self.num_engines * len(LAYERS) * len(self.batch_sizes)


@dataclass(frozen=True)
class RankSeconds:
    """Step times of several ranks, measured with models of MANY_LAYERS (``many``) and FEW_LAYERS (``few``) layers.
    ``many``, ``few``: float [num_batch_sizes, 2], seconds of the S-part and of the engine's own work. ``spread``:
    largest minus smallest ``many`` of several engines, relative to the median. ``threads``: of each rank's S-worker.
    """

    threads: int
    many: np.ndarray
    few: np.ndarray
    spread: np.ndarray


def rank_threads(num_ranks: int) -> int:
    """Return the threads of each rank's S-worker, and as many of its R-worker, if ``num_ranks`` share the cores."""
    return max(1, len(usable_cores()) // num_ranks)


def calibrate_ranks(
    profile: HardwareProfile, config: EngineConfig, plan: RankCalibration, advance: Callable[[], object]
) -> HardwareProfile:
    """Measure ``plan.num_ranks`` ranks on this machine; return ``profile`` with their times added."""
    return with_rank_points(profile, plan, measure_ranks(profile, config, plan, advance))


def measure_ranks(
    profile: HardwareProfile, config: EngineConfig, plan: RankCalibration, advance: Callable[[], object]
) -> RankSeconds:
    """Run engines of ``plan.num_ranks`` ranks and return the times of their steps.

    A process can start only one group of ranks at a time. So models of few and of many layers are measured one after
    the other, and each time is corrected by the machine's speed, which a short reference call shows.
    """
    with closing(DecodeRig(with_layers(measuring(config), MANY_LAYERS), InstantBackend(config.block_size))) as single:
        threads = 1 if single.engine.s_model.on_gpu else rank_threads(plan.num_ranks)
        call = partial(s_anchor_seconds, single, plan.anchor_threads)
        anchor = Anchor(call, profile.anchor_seconds("s", plan.anchor_threads))
        found: dict[int, list[np.ndarray]] = {layers: [] for layers in LAYERS}
        for _ in range(plan.num_engines):
            for layers in LAYERS:
                with _rank_rig(config, plan, layers, threads) as rig:
                    found[layers].append(_measured(rig, anchor, plan, advance))
    many, few = (np.median(found[layers], axis=0) for layers in LAYERS)
    return RankSeconds(threads, many, few, np.ptp(found[MANY_LAYERS], axis=0) / many)


def with_rank_points(profile: HardwareProfile, plan: RankCalibration, measured: RankSeconds) -> HardwareProfile:
    """Return ``profile`` with the times in ``measured`` added.

    Raise ProfileError if more layers took no longer than fewer.
    """
    s_part, host = _points(profile, plan, measured)
    return replace(profile, s_part=(*profile.s_part, *s_part), host=(*profile.host, *host))


def rank_configurations(shape: ModelShape, cores: Sequence[int], num_ranks: int) -> list[Configuration]:
    """Return configurations of ``num_ranks`` ranks on ``cores``, each taking turns with an R-worker in its process."""
    threads = rank_threads(num_ranks)
    deployment, heads = Deployment(threads, threads, num_ranks=num_ranks, cores=len(cores)), kv_head_counts(shape)
    return [
        Configuration(
            f"{num_ranks} ranks", deployment, "inproc", None, *size, KV_DTYPES[index % len(KV_DTYPES)],
            heads[index % len(heads)],
        )
        for index, size in enumerate(SIZES)
    ]  # fmt: skip


def _measured(rig: DecodeRig, anchor: Anchor, plan: RankCalibration, advance: Callable[[], object]) -> np.ndarray:
    """Return a step's seconds of S-part and host, [num_batch_sizes, 2], corrected for the machine's drift."""
    rows = []
    for batch_size in plan.batch_sizes:
        steadied = steadily([anchor], partial(_samples, rig, batch_size, plan), plan.most_tries)[0]
        found: Sequence[Measured] = [steadied.measured(column) for column in range(2)]
        rows.append([each.seconds for each in found])
        advance()
    return np.array(rows)


def _samples(rig: DecodeRig, batch_size: int, plan: RankCalibration) -> np.ndarray:
    """Return the seconds of the S-part and of the host per step, [steps, 2].
    The number of S-worker threads is set again, since timing the anchor has changed it.
    """
    steps = rig.decode(batch_size, SHORT_CONTEXT, plan.rounds * SAMPLE_STEPS, rig.engine.config.s_threads)
    return np.array([(step.s_seconds, step.host_seconds) for step in steps])


def _points(
    profile: HardwareProfile, plan: RankCalibration, measured: RankSeconds
) -> tuple[list[SPartPoint], list[HostPoint]]:
    """Return the ranks' S-part and host times for the profile. Host times exclude the R-workers' cost per step."""
    s_part, host = [], []
    many, few, spread = measured.many, measured.few, measured.spread
    once, per_row = replace(profile, host=()).step_overhead_seconds("inproc")
    for index, batch_size in enumerate(plan.batch_sizes):
        layer = (many[index, 0] - few[index, 0]).item() / (MANY_LAYERS - FEW_LAYERS)
        if layer <= 0:
            raise ProfileError(
                f"tensor_parallel_size: {MANY_LAYERS} layers at batch size {batch_size} took no longer than "
                f"{FEW_LAYERS}: other processes use this machine's cores; calibrate while they are idle"
            )
        head = max(few[index, 0].item() - FEW_LAYERS * layer, 0.0)
        s_part.append(SPartPoint(batch_size, layer, head, spread[index, 0].item(), measured.threads, plan.num_ranks))
        own = max(many[index, 1].item() - once - per_row * batch_size, 0.0)
        host.append(HostPoint(batch_size, own, spread[index, 1].item(), plan.num_ranks))
    return s_part, host


def _rank_rig(config: EngineConfig, plan: RankCalibration, num_layers: int, threads: int) -> closing[DecodeRig]:
    most = max(plan.batch_sizes)
    own = replace(
        with_layers(measuring(config), num_layers), tensor_parallel_size=plan.num_ranks, num_mini_batches=1,
        s_threads=threads, r_threads=threads, max_num_seqs=most, kv_cache_memory="1GiB",
    )  # fmt: skip
    return closing(DecodeRig(own))
