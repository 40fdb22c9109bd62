"""How much slower S-worker and R-worker are while both work, on cores of their own of one machine."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from fastdecode.bench.attention_rig import AttentionRig
from fastdecode.bench.decode_rig import DecodeRig
from fastdecode.bench.instant import InstantBackend
from fastdecode.bench.samples import (
    ANCHOR_ROWS,
    MANY_LAYERS,
    SAMPLE_STEPS,
    SHORT_CONTEXT,
    core_list,
    r_worker_config,
    with_layers,
)
from fastdecode.config import EngineConfig
from fastdecode.machine import usable_cores
from fastdecode.perfmodel.calibration import summary
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.points import ContentionPoint

SEQUENCES, CONTEXT = 32, 1024


def measure_contention(
    config: EngineConfig, shape: ModelShape, s_threads: int, r_threads: int, rounds: int
) -> ContentionPoint:
    """S on the first cores and a spawned R-worker on the last: each alone, then both at once, A B A B."""
    cores = usable_cores()
    s_cores, r_cores = cores[:s_threads], cores[-r_threads:]
    pinned = replace(config, s_cores=core_list(s_cores), r_cores=core_list(r_cores), s_threads=s_threads)
    layout = replace(shape, num_layers=2).kv_layout(shape.dtype)
    kv_bytes = SEQUENCES * (CONTEXT + 4096) * layout.kv_bytes_per_token
    r_rig = AttentionRig(r_worker_config(pinned, "spawn", r_threads, kv_bytes), layout)
    s_rig = DecodeRig(with_layers(pinned, MANY_LAYERS), InstantBackend(config.block_size))
    try:
        r_rig.fill(SEQUENCES, CONTEXT)
        found = np.array([_round(s_rig, r_rig) for _ in range(rounds)])
    finally:
        s_rig.close()
        r_rig.close()
    s_part, r_part = summary(found[:, 0]), summary(found[:, 1])
    return ContentionPoint(
        s_threads,
        r_threads,
        max(s_part.seconds, 1.0),
        max(r_part.seconds, 1.0),
        max(s_part.spread, r_part.spread),
        shape.num_kv_heads,
    )


def _round(s_rig: DecodeRig, r_rig: AttentionRig) -> tuple[float, float]:
    """Times as slow as alone: S, R."""
    r_rig.rewind(CONTEXT)
    s_alone = _s_seconds(s_rig)
    r_alone = _r_seconds(r_rig)
    busy: list[float] = []
    done = threading.Event()

    def keep_busy() -> None:
        while not done.is_set():
            busy.append(float(np.mean(r_rig.step().busy_seconds)))

    r_side = threading.Thread(target=keep_busy)
    r_side.start()
    try:
        s_beside = _s_seconds(s_rig)
    finally:
        done.set()
        r_side.join()
    return s_beside / s_alone, float(np.median(busy[:-1] or busy)) / r_alone


def _s_seconds(rig: DecodeRig) -> float:
    steps = rig.decode(ANCHOR_ROWS, SHORT_CONTEXT, 2 * SAMPLE_STEPS)
    return float(np.median([step.s_seconds for step in steps]))


def _r_seconds(rig: AttentionRig) -> float:
    return float(np.median([np.mean(rig.step().busy_seconds) for _ in range(2 * SAMPLE_STEPS)]))
