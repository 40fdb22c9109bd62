"""Samples for calibration and validation: step times of a ``DecodeRig`` or ``AttentionRig``, and of reference calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ProfileError
from fastdecode.core.machine import usable_cores
from fastdecode.perfmodel.calibration import Measured, summary
from fastdecode.perfmodel.lab.measure.attention_rig import AttentionRig
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig, InstantBackend
from fastdecode.perfmodel.measurements import ContentionPoint
from fastdecode.perfmodel.model_shape import ModelShape

FEW_LAYERS, MANY_LAYERS = 1, 5
"""Numbers of layers of two models. A layer takes a fourth of the difference between them."""

NUM_LAYERS = 4
"""Layers of validated models."""

R_LAYERS = 2
"""Layers of each head shape in the measured cache.

So the next layer's tokens evict the last one's from CPU caches.
"""

SHORT_CONTEXT = 16
SAMPLE_STEPS = 4
FEWEST_ROUNDS, ENOUGH_SECONDS = 3, 8.0
MOST_DISTURBED = 20
BETWEEN_LAYERS_SECONDS = 5e-4
"""Pause between two calls. An S-worker computes meanwhile, so R-workers are asleep at the next one."""

ANCHOR_ROWS, ANCHOR_SEQUENCES, ANCHOR_CONTEXT, ANCHOR_STEPS = 64, 64, 512, 16


def measuring(config: EngineConfig) -> EngineConfig:
    """Return ``config`` with the settings of a :class:`DecodeRig`: random weights, and prompts before decodes."""
    here = replace(config, r_workers="inproc", key_file=None, security=None, pool_listen=None, trace=None)
    # Limit of running sequences and of prompt tokens per step: more than any measurement needs
    many_sequences = 1 << 14
    return replace(
        here, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, schedule="prefill-first",
        kv_load_limit=None, tbt_target=None, profile=None, max_num_seqs=many_sequences,
        max_num_batched_tokens=many_sequences, tensor_parallel_size=1,
    )  # fmt: skip


def with_layers(config: EngineConfig, num_layers: int) -> EngineConfig:
    """Return ``config`` with a model of ``num_layers`` layers."""
    return replace(config, hf_overrides={**config.hf_overrides, "num_hidden_layers": num_layers})


def r_worker_config(config: EngineConfig, r_worker: str, threads: int | None, kv_bytes: int) -> EngineConfig:
    """Return ``config`` with one R-worker: "here", "inproc", "spawn" or "host:port". A local one holds ``kv_bytes``."""
    if r_worker not in ("here", "inproc", "spawn"):
        return replace(config, r_workers=r_worker)
    spec = "spawn:1" if r_worker == "spawn" else "inproc"
    return replace(config, r_workers=spec, r_threads=threads, kv_cache_memory=int(1.1 * kv_bytes) + (64 << 20))


def core_list(cores: Sequence[int]) -> str:
    """Return core numbers in the form of ``--s-cores``."""
    return ",".join(map(str, cores))


def s_samples(few: DecodeRig, many: DecodeRig, batch_size: int, threads: int, rounds: int) -> np.ndarray:
    """Return a step's seconds of one layer, of the S-part besides layers, and of the host, [rounds, 3].

    ``few``, ``many``: engines whose models differ only in their number of layers. Each round measures both. After
    ENOUGH_SECONDS, FEWEST_ROUNDS rounds suffice. A round in which more layers took no longer is repeated. After
    MOST_DISTURBED such rounds, raise ProfileError.
    """
    rows: list[tuple[float, float, float]] = []
    disturbed = 0
    begin = time.perf_counter()
    while len(rows) < min(rounds, FEWEST_ROUNDS) or (
        len(rows) < rounds and time.perf_counter() - begin < ENOUGH_SECONDS
    ):
        short, long = (rig.decode(batch_size, SHORT_CONTEXT, SAMPLE_STEPS, threads) for rig in (few, many))
        few_seconds, many_seconds = (float(np.median([step.s_seconds for step in steps])) for steps in (short, long))
        layer = (many_seconds - few_seconds) / (MANY_LAYERS - FEW_LAYERS)
        if layer <= 0.0:
            disturbed += 1
            if disturbed > MOST_DISTURBED:
                raise ProfileError(
                    f"{MANY_LAYERS} layers at batch size {batch_size} took no longer than {FEW_LAYERS}, {disturbed} "
                    "times: other processes use this machine's cores; calibrate while they are idle"
                )
            continue
        host = float(np.median([step.host_seconds for step in long]))
        rows.append((layer, few_seconds - FEW_LAYERS * layer, host))
    return np.array(rows)


def r_samples(rig: AttentionRig, num_shapes: int, num_steps: int) -> np.ndarray:
    """Return the R-worker's busy seconds for a layer of each shape, [num_steps, num_shapes].

    The layers of ``rig`` have ``num_shapes`` shapes, each the same number of times.
    """
    steps = [rig.step().busy_seconds.reshape(num_shapes, -1).mean(axis=1) for _ in range(num_steps)]
    return np.array(steps)


def link_measured(rig: AttentionRig, num_steps: int) -> tuple[Measured, Measured]:
    """Return two times: of one layer's trip to the R-worker and back, and to begin and end a step."""
    steps = [rig.step(BETWEEN_LAYERS_SECONDS) for _ in range(num_steps)]
    ways = np.concatenate([step.link_seconds for step in steps])
    return summary(ways), summary(np.array([step.plan_seconds for step in steps]))


def s_anchor_seconds(rig: DecodeRig, threads: int) -> float:
    """Return the S-part's seconds in a step of ANCHOR_ROWS rows, which show the machine's speed."""
    steps = rig.decode(ANCHOR_ROWS, SHORT_CONTEXT, SAMPLE_STEPS, threads)
    return float(np.median([step.s_seconds for step in steps]))


def r_anchor_seconds(rig: AttentionRig) -> float:
    """Return one layer's seconds over ANCHOR_SEQUENCES of ANCHOR_CONTEXT tokens, which show the machine's speed."""
    rig.rewind(ANCHOR_CONTEXT)
    return float(np.median([np.mean(rig.step().busy_seconds) for _ in range(ANCHOR_STEPS)]))


SEQUENCES, CONTEXT = 32, 1024


def measure_contention(
    config: EngineConfig, shape: ModelShape, s_threads: int, r_threads: int, rounds: int
) -> ContentionPoint:
    """Time the S-worker on the first cores and a spawned R-worker on the last: each alone, then both together."""
    cores = usable_cores()
    s_cores, r_cores = cores[:s_threads], cores[-r_threads:]
    pinned = replace(config, s_cores=core_list(s_cores), r_cores=core_list(r_cores), s_threads=s_threads)
    layout = shape.some_layers(2)
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
    """Time S-worker and R-worker alone, then both at once; return how many times slower each is then."""
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
