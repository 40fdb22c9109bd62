"""Compares predicted with measured times of real configurations on this machine.

Short reference calls (anchors) show how fast the machine is at present."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import usable_cores
from fastdecode.perfmodel.calibration import Anchor, Steadied, most_moved, steadily
from fastdecode.perfmodel.deployment import Deployment, Drift, deployed_step_model
from fastdecode.perfmodel.lab.measure.attention_rig import AttentionRig
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig, InstantBackend
from fastdecode.perfmodel.lab.measure.offline_run import OfflineRun, run_offline
from fastdecode.perfmodel.lab.measure.samples import (
    ANCHOR_CONTEXT,
    ANCHOR_SEQUENCES,
    MANY_LAYERS,
    NUM_LAYERS,
    R_LAYERS,
    core_list,
    measuring,
    r_anchor_seconds,
    r_worker_config,
    s_anchor_seconds,
    with_layers,
)
from fastdecode.perfmodel.load import NO_RANGES, Load, RangeParts, tail_partials
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.rank_costs import rank_shape
from fastdecode.perfmodel.storage_costs import StorageCosts

NUM_STEPS = 12

SIZES = ((16, 128), (48, 256), (256, 128), (96, 512), (16, 2048), (64, 1024), (16, 4096))
"""Sequences in flight, and tokens each attends to: contexts of 128 to 4096, and at most 65,536 cached tokens."""


KV_DTYPES = ("float32", "bfloat16", "int8")
GROUPS = (1, 4)


@dataclass(frozen=True)
class Configuration:
    """A measured engine's settings. ``cores``: of S-worker and of R-workers; None: they take turns on all cores."""

    name: str
    deployment: Deployment
    r_workers: str
    cores: tuple[tuple[int, ...], tuple[int, ...]] | None
    batch_size: int
    context_len: int
    kv_dtype: str
    num_kv_heads: int
    kv_shard_tokens: int | None = None

    @property
    def ranges(self) -> RangeParts:
        """One step's additional work for ranges: queries sent, and partial results returned."""
        if self.kv_shard_tokens is None:
            return NO_RANGES
        closed, tail = divmod(self.context_len - 1, self.kv_shard_tokens)
        return RangeParts(self.batch_size * closed, self.batch_size * (closed + tail_partials(tail + 1)))

    def engine_config(self, config: EngineConfig, kv_bytes_per_token: int) -> EngineConfig:
        """Return the configuration of the measured engine."""
        s_cores, r_cores = (core_list(cores) for cores in self.cores) if self.cores else (None, None)
        longer = {"max_position_embeddings": self.context_len + 1} if self.kv_shard_tokens else {}
        tokens = self.batch_size * (self.context_len + 256) + 8 * 4096
        return replace(
            config,
            hf_overrides={
                **config.hf_overrides,
                "num_hidden_layers": NUM_LAYERS,
                "num_key_value_heads": self.num_kv_heads,
                **longer,
            },
            kv_shard_tokens=self.kv_shard_tokens,
            kv_cache_dtype=self.kv_dtype,
            kv_cache_memory=int(1.1 * tokens * kv_bytes_per_token) + (64 << 20),
            num_mini_batches=self.deployment.num_mini_batches,
            r_workers=self.r_workers,
            s_cores=s_cores,
            r_cores=r_cores,
            s_threads=self.deployment.s_threads,
            r_threads=self.deployment.r_threads,
            tensor_parallel_size=self.deployment.num_ranks,
        )


@dataclass(frozen=True)
class ValidatedRow:
    """Predicted and measured times of a configuration. ``…_seconds``: medians over decode steps."""

    configuration: Configuration
    predicted_step_seconds: float
    measured_step_seconds: float
    predicted_s_seconds: float
    measured_s_seconds: float
    predicted_r_seconds: float
    measured_r_seconds: float
    measured_host_seconds: float
    drift: Drift
    moved: float
    tries: int

    @property
    def error(self) -> float:
        """The prediction's relative error: predicted over measured seconds of a step, minus one."""
        return self.predicted_step_seconds / self.measured_step_seconds - 1.0


def configurations(shape: ModelShape, cores: Sequence[int]) -> list[Configuration]:
    """Return every combination of SIZES and four ways to divide ``cores``, with varying KV dtypes and KV heads."""
    if len(cores) < 2:
        raise ConfigError("validate needs at least two cores: some configurations give R-workers cores of their own")
    half = len(cores) // 2
    apart = (tuple(cores[:half]), tuple(cores[-half:]))
    ways = (
        ("in turn", Deployment(len(cores), len(cores)), "inproc", None),
        ("own cores", Deployment(half, half, 1, 2, "inproc", separate_cores=True), "inproc", apart),
        ("process", Deployment(half, half, 1, 2, "spawn", separate_cores=True), "spawn:1", apart),
        ("two on one", Deployment(half, half, 2, 2, "spawn", True, r_workers_per_core=2), "spawn:2", apart),
    )
    heads = kv_head_counts(shape)
    return [
        Configuration(
            name, deployment, r_workers, pinned, *size, KV_DTYPES[index % len(KV_DTYPES)], heads[index % len(heads)]
        )
        for index, ((name, deployment, r_workers, pinned), size) in enumerate(product(ways, SIZES))
    ]


def kv_head_counts(shape: ModelShape) -> list[int]:
    """Return the numbers of KV heads that give as many query heads per KV head as GROUPS says, where possible."""
    return [shape.num_heads // group for group in GROUPS if shape.num_heads % group == 0]


def range_configurations(shape: ModelShape, cores: Sequence[int]) -> list[Configuration]:
    """Return configurations with sequences cut into ranges on two R-workers, both on the second half of ``cores``."""
    if len(cores) < 2:
        raise ConfigError("validate needs at least two cores: S-worker and R-workers have separate ones")
    half, heads = len(cores) // 2, kv_head_counts(shape)
    apart, deployment = (tuple(cores[:half]), tuple(cores[-half:])), Deployment(half, half, 2, 2, "spawn", True, 2)
    # Runs to validate: sequences, tokens of each, and tokens of a range
    range_sizes = (
        (2, 16384, 2048), (2, 32768, 4096), (4, 8192, 1024), (8, 4096, 512), (16, 4096, 2048), (32, 2048, 1024),
        (64, 1024, 512),
    )  # fmt: skip
    return [
        Configuration(
            "ranges", deployment, "spawn:2", apart, batch_size, context_len, KV_DTYPES[index % len(KV_DTYPES)],
            heads[index % len(heads)], range_tokens,
        )
        for index, (batch_size, context_len, range_tokens) in enumerate(range_sizes)
    ]  # fmt: skip


def require_measured(profile: HardwareProfile, todo: Sequence[Configuration], model: ModelShape | None) -> None:
    """Raise ProfileError if ``profile`` lacks times for one of ``todo``, or for a whole workload of ``model``."""
    cores = len(usable_cores())
    if model is not None:
        deployed_step_model(profile, model, model.dtype, Deployment(cores, cores))
    for each in todo:
        shape = profile.shape.with_kv_heads(each.num_kv_heads)
        deployed_step_model(profile, shape, each.kv_dtype, each.deployment)
        for part, threads in zip("sr", each.deployment.anchor_threads, strict=True):
            profile.anchor_seconds(part, threads)


class Validation:
    """Measures configurations, each between two timings of the same short reference calls (anchors)."""

    def __init__(self, config: EngineConfig, profile: HardwareProfile) -> None:
        self.profile = profile
        self.config = measuring(config)
        self._anchors: dict[tuple[str, int], Anchor] = {}
        self._cleanup = ExitStack()
        self._s_rig = DecodeRig(with_layers(self.config, MANY_LAYERS), InstantBackend(config.block_size))
        self._cleanup.callback(self._s_rig.close)

    def run(self, todo: Sequence[Configuration], advance: Callable[[], object]) -> Iterator[ValidatedRow]:
        """Yield one row per configuration as it is measured."""
        for configuration in todo:
            yield self._validated(configuration)
            advance()

    def offline(self) -> OfflineRun:
        """Measure and simulate a whole workload, with S-worker and R-worker in turn on all cores."""
        cores = len(usable_cores())
        # Times that each reference call runs before the workload, and again after it
        looks = 4
        anchors = [anchor.averaged(looks) for anchor in (self._s_anchor(cores), self._r_anchor(cores, None))]
        return run_offline(self.config, self.profile, anchors)

    def close(self) -> None:
        """Close the engines and R-workers that serve as anchors."""
        self._cleanup.close()

    def _validated(self, configuration: Configuration) -> ValidatedRow:
        shape, deployment = _shape(self.profile, configuration), configuration.deployment
        kv_bytes = rank_shape(shape, deployment.num_ranks).kv_layout(configuration.kv_dtype).kv_bytes_per_token
        r_cores = configuration.cores[1] if configuration.cores else None
        s_threads, r_threads = deployment.anchor_threads
        anchors = [self._s_anchor(s_threads), self._r_anchor(r_threads, r_cores)]
        rig = DecodeRig(configuration.engine_config(self.config, kv_bytes))
        try:
            steadied = steadily(anchors, partial(_steps, rig, configuration))
        finally:
            rig.close()
        return validated_row(self.profile, configuration, steadied)

    def _s_anchor(self, threads: int) -> Anchor:
        key = ("s", threads)
        if key not in self._anchors:
            call = partial(s_anchor_seconds, self._s_rig, threads)
            self._anchors[key] = Anchor(call, self.profile.anchor_seconds(*key))
        return self._anchors[key]

    def _r_anchor(self, threads: int, cores: tuple[int, ...] | None) -> Anchor:
        """Return a reference call: attention of an R-worker with ``threads`` threads on ``cores``."""
        key = ("r", threads)
        if key not in self._anchors:
            layout = self.profile.shape.some_layers(R_LAYERS)
            kv_bytes = ANCHOR_SEQUENCES * (ANCHOR_CONTEXT + 128) * layout.kv_bytes_per_token
            pinned = replace(self.config, r_cores=core_list(cores) if cores else None)
            rig = AttentionRig(r_worker_config(pinned, "inproc", key[1], kv_bytes), layout)
            self._cleanup.callback(rig.close)
            rig.fill(ANCHOR_SEQUENCES, ANCHOR_CONTEXT)
            self._anchors[key] = Anchor(partial(r_anchor_seconds, rig), self.profile.anchor_seconds(*key))
        return self._anchors[key]


def validated_row(profile: HardwareProfile, configuration: Configuration, steadied: Sequence[Steadied]) -> ValidatedRow:
    """Return the prediction of ``profile`` together with the measurement.
    ``steadied``: the measurement twice, first with the drift of the S-part, then of the R-part. Its samples are float
    [steps, 5]: seconds of the step, of the S-part, of the R-part and of the host, and the KV load.
    """
    shape, deployment = _shape(profile, configuration), configuration.deployment
    drift = Drift(steadied[0].drift, steadied[1].drift)
    model = deployed_step_model(profile, shape, configuration.kv_dtype, deployment, drift)
    model = replace(model, storage=StorageCosts.of(shape, slowness=drift.s_part))
    wall, s_part, r_part, host, kv_load = np.median(steadied[0].samples, axis=0).tolist()
    rows = configuration.batch_size
    load = Load.decode(rows, kv_load).with_ranges(configuration.ranges)
    stages, calls = model.stages(load), model.num_layers * model.num_mini_batches
    head = model.num_mini_batches * model.s_part.head_seconds(rows / model.num_mini_batches)
    return ValidatedRow(
        configuration=configuration,
        predicted_step_seconds=model.seconds(load),
        measured_step_seconds=wall,
        predicted_s_seconds=calls * stages.s_part + head,
        measured_s_seconds=s_part,
        predicted_r_seconds=calls * stages.r_part,
        measured_r_seconds=r_part,
        measured_host_seconds=host,
        drift=drift,
        moved=most_moved(steadied),
        tries=steadied[0].tries,
    )


def _shape(profile: HardwareProfile, configuration: Configuration) -> ModelShape:
    """Return the model that is run: NUM_LAYERS of the profile's layers."""
    return replace(profile.shape, num_layers=NUM_LAYERS).with_kv_heads(configuration.num_kv_heads)


def _steps(rig: DecodeRig, configuration: Configuration) -> np.ndarray:
    """Return [NUM_STEPS, 5]: seconds of the step, the S-part, the busiest core's R-workers and the host; KV load."""
    deployment = configuration.deployment
    steps = rig.decode(configuration.batch_size, configuration.context_len, NUM_STEPS, deployment.s_threads)
    sharing = deployment.r_workers_per_core
    of_r = sum if sharing > 1 else max
    return np.array(
        [(step.wall_seconds, step.s_seconds, of_r(step.r_seconds), step.host_seconds, step.kv_load) for step in steps]
    )
