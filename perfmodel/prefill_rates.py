"""Computes the times of prefill workers from measured prompts or from a GPU's nominal figures."""

from __future__ import annotations

import math

import numpy as np

from fastdecode.perfmodel.calibration import fit_parts
from fastdecode.perfmodel.hardware import Gpu
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.partition import Forecast, PartitionTable
from fastdecode.perfmodel.prefill_times import PrefillLink, PrefillTimes, PromptAttentionTimes, triangle_pairs
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.stages import GpuSPart, MeasuredSPart

TILE_ROWS = 256
"""Rows of a tile of prompt attention on a CPU, in torch's kernel and in ``sworker/run/prompts.py``."""

MANY_ROWS = 1 << 20
"""A number of rows so large that fixed costs vanish, to find the seconds per row of matrix products."""


def before_share(shape: ModelShape) -> float:
    """Return the fraction of a layer's matrix products that precede attention: those for q, k and v."""
    output_dim = shape.latent.value if shape.latent else shape.head_dim
    output_parameters = shape.hidden_size * shape.num_heads * output_dim
    return (shape.attention_parameters - output_parameters) / shape.active_layer_parameters


def gpu_prefill_model(shape: ModelShape, gpu: Gpu, link: PrefillLink, kv_dtype: str = "auto") -> PrefillTimes:
    """Return the times of prefill workers with one GPU each. Attention is taken to compute as fast as dense layers.

    The kernel is assumed to skip tiles that causality hides. A pair's score and value take 4·N·H operations, or
    2·N·(key dims + value dims) if these differ.
    """
    layer = shape.layer_layout
    pair_seconds = 2.0 * layer.num_heads * (layer.key_head_dim + layer.value_head_dim) / gpu.flops_per_second.achieved
    # Query rows per tile of fused attention kernels on GPUs
    gpu_tile_rows = 128
    return PrefillTimes(
        num_layers=shape.num_layers,
        s_part=GpuSPart(shape, gpu),
        attention=PromptAttentionTimes(pair_seconds, gpu_tile_rows),
        kv_bytes=shape.appending_row_bytes,
        link=link,
        before_share=before_share(shape),
        stored_kv_bytes=stored_kv_bytes(shape, kv_dtype),
    )


def stored_kv_bytes(shape: ModelShape, kv_dtype: str) -> int:
    """Return the bytes of one cached token in one layer. ``kv_dtype`` "auto" means the model's dtype."""
    kv_dtype = shape.dtype if kv_dtype == "auto" else kv_dtype
    return shape.layer_layout.token_bytes(kv_dtype)


def measured_prefill_model(
    profile: HardwareProfile, num_busy: int = 1, shape: ModelShape | None = None, kv_dtype: str = "auto"
) -> PrefillTimes:
    """Return times of a prefill worker like the first measured one, while ``num_busy`` workers compute.

    ``shape``: may have another number of layers than the profile's. A prompt of n tokens takes a·n for products, b per
    pair of its attention, and c once. Raise ProfileError if no worker was measured.
    """
    alone = _alone(profile, 0)
    if not alone:
        raise profile.lacks("no prefill workers", [], "`fastdecode calibrate --prefill` measures them")
    lengths, seconds = np.array(sorted(alone)), np.array([alone[n] for n in sorted(alone)])
    pairs = np.array([triangle_pairs(int(n), TILE_ROWS) for n in lengths])
    products, pair, once = fit_parts(np.stack([lengths, pairs, np.ones(len(lengths))], 1), seconds).tolist()
    shape, measured_layers = shape or profile.shape, profile.shape.num_layers
    per_row, per_pair = products / measured_layers, pair / measured_layers
    model = PrefillTimes(
        num_layers=shape.num_layers,
        s_part=MeasuredSPart((1, MANY_ROWS), (per_row, per_row * MANY_ROWS), (0.0, 0.0)),
        attention=PromptAttentionTimes(max(per_pair, per_row * 1e-9), TILE_ROWS),
        kv_bytes=shape.appending_row_bytes,
        link=_link(profile),
        before_share=before_share(shape),
        job_seconds=once,
        stored_kv_bytes=stored_kv_bytes(shape, kv_dtype),
    )
    return model.times(slowdown(profile, num_busy))


def measured_speeds(profile: HardwareProfile) -> tuple[float, ...]:
    """Return each measured prefill worker's speed while the others rest, relative to worker 0."""
    first = _alone(profile, 0)
    speeds = []
    for worker in sorted({point.worker for point in profile.prefill}):
        own = _alone(profile, worker)
        ratios = [first[n] / own[n] for n in set(first) & set(own)]
        speeds.append(float(np.median(ratios)) if ratios else 1.0)
    return tuple(speeds)


def slowdown(profile: HardwareProfile, num_busy: int) -> float:
    """Return how many times slower a worker is while ``num_busy`` compute, from the nearest measured number."""
    if num_busy == 1:
        return 1.0
    measured = {point.num_busy for point in profile.prefill if point.num_busy > 1}
    if not measured:
        return 1.0
    nearest = min(measured, key=lambda number: (abs(number - num_busy), number))
    beside = [point for point in profile.prefill if point.num_busy == nearest]
    ratios = [
        point.seconds / alone for point in beside if (alone := _alone(profile, point.worker).get(point.num_tokens))
    ]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def measured_forecast(
    profile: HardwareProfile, num_workers: int, method: str = "kvr", kv_dtype: str = "auto"
) -> Forecast:
    """Return a forecast of prompts' parts and times on ``num_workers`` prefill workers as fast as the measured ones."""
    model = measured_prefill_model(profile, num_workers, kv_dtype=kv_dtype)
    return Forecast(model, PartitionTable(profile.partitions), method)


def _alone(profile: HardwareProfile, worker: int) -> dict[int, float]:
    """Return the seconds of a prompt on ``worker`` while the others rest, by prompt length in tokens."""
    points = (point for point in profile.prefill if point.worker == worker and point.num_busy == 1)
    return {point.num_tokens: point.seconds for point in points}


def _link(profile: HardwareProfile) -> PrefillLink:
    """Return the rate and latency of the slowest measured link to R-workers, in one direction."""
    way = profile.transport()
    return PrefillLink(min(way.hop_bytes_per_second, default=math.inf), way.latency_seconds / 2)
