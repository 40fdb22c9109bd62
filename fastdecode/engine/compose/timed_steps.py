"""Forecasts of step times: from a hardware profile, or from steps that are timed when the engine starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import usable_cores
from fastdecode.core.protocols import StepTime
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import RWorkerInfo
from fastdecode.perfmodel.deployment import Deployment, check_alike, check_own, deployed_step_model, this_machine
from fastdecode.perfmodel.equations import token_budget
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.step_model import MeasuredStepTime, StepModel
from fastdecode.sworker import SModel, SWorker
from fastdecode.sworker.model.shape import model_shape

logger = logging.getLogger(__name__)

CPU_TILE_TOKENS = 64
"""A token budget with a time target is a multiple of this number of tokens, with which products are fastest."""


def budget_within(target_seconds: float, step_time: StepTime, least: int, most: int) -> int:
    """Return the largest number of tokens, from ``least`` to ``most``, whose step takes at most ``target_seconds``.
    This is Sarathi-Serve's token budget τ. ``least``: one token per decoding sequence. Raise ConfigError if a step of
    ``least`` tokens takes longer.
    """
    if step_time(least, 0) > target_seconds:
        raise ConfigError(
            f"tbt_target: a step of {least} tokens, one for each of max_num_seqs, takes {step_time(least, 0):.3g} s: "
            f"give at least that instead of {target_seconds:.3g} s, or lower max_num_seqs"
        )
    if most < CPU_TILE_TOKENS or step_time(CPU_TILE_TOKENS, 0) > target_seconds:
        return least
    return max(least, token_budget(step_time, target_seconds, tile_tokens=CPU_TILE_TOKENS, most_tokens=most))


def profile_steps(s_worker: SWorker, r_workers: Sequence[RWorkerInfo], most_tokens: int) -> MeasuredStepTime:
    """Time steps with one prompt chunk each, whose lengths double up to ``most_tokens``; return the times.
    The steps run on the R-worker with most free memory, and leave no tokens in its cache.
    """
    index = max(range(len(r_workers)), key=lambda each: r_workers[each].room_tokens)
    most_tokens = min(most_tokens, r_workers[index].room_tokens)
    largest = min(CPU_TILE_TOKENS, max(most_tokens, 2))
    counts = [largest // 2, largest]
    while 2 * counts[-1] <= most_tokens:
        counts.append(2 * counts[-1])
    return MeasuredStepTime(counts, [_step_seconds(s_worker, index, len(r_workers), count) for count in counts])


def _step_seconds(s_worker: SWorker, index: int, num_r_workers: int, num_tokens: int) -> float:
    """Return the seconds of the faster of two steps with ``num_tokens`` prompt tokens on R-worker ``index``."""
    attends = s_worker.layout.cannot("scratch") is not None
    # No other sequence has this id, not even one that R-workers hold for an earlier engine
    trial_id = 1 << 62
    chunk = Chunk(trial_id, index, 0, [0] * num_tokens, attends=attends, samples=False, is_decode=False)
    step = ScheduledStep((MiniBatch.of([chunk]),), ((),) * num_r_workers)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        s_worker.backend.begin_step(step.to_step_plan())
        try:
            s_worker.run(step, {})
        finally:
            s_worker.backend.abandon_step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def with_absorption(config: EngineConfig) -> EngineConfig:
    """Return ``config`` with latent absorption decided: "auto" becomes "r" if the profile says that this is faster.
    With "r", R-workers multiply the latents (MLA) by the K and V projections. Every rank decides the same.
    """
    if config.latent_absorption != "auto" or config.profile is None:
        return config
    shape, spec = model_shape(config), config.r_worker_spec
    kv_dtype = shape.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    rows = config.max_num_seqs / (config.num_mini_batches or 2)
    profile = load_profile(str(config.profile))
    names = spec.addresses or (spec.kind,)
    if shape.latent is None or not profile.absorbs_sooner_at_r_workers(shape, kv_dtype, rows, names):
        return config
    logger.info("R-workers multiply K and V of latents: by the profile, they answer sooner this way")
    return replace(config, latent_absorption="r")


def live_step_model(
    config: EngineConfig, model: SModel, r_workers: Sequence[RWorkerInfo], num_mini_batches: int
) -> StepModel:
    """Return the ``StepModel`` that forecasts this engine's step times from ``config.profile``.

    Raise ProfileError if the profile is of another machine or model.
    """
    profile = load_profile(str(config.profile))
    check_own(profile, this_machine(model.device_name, profile.machine.r_worker, r_workers[0].isa))
    shape, spec = model.shape, config.r_worker_spec
    check_alike(profile, shape)
    names = spec.addresses or (spec.kind,)
    deployment = Deployment(
        s_threads=1 if model.on_gpu else config.s_thread_count,
        r_threads=r_workers[0].num_threads,
        num_r_workers=len(r_workers),
        num_mini_batches=num_mini_batches,
        r_worker=names[0],
        separate_cores=config.separate_cores or model.on_gpu,
        r_workers_per_core=_r_workers_per_core(config, r_workers),
        longest_context=model.max_model_len,
    )
    each = (
        deployed_step_model(profile, shape, model.layout.kv_dtype, replace(deployment, r_worker=name)) for name in names
    )
    tokens = config.max_num_seqs
    # the slowest R-worker's times, since a step waits for all R-workers
    return max(each, key=lambda steps: steps(tokens, tokens * model.max_model_len))


def _r_workers_per_core(config: EngineConfig, r_workers: Sequence[RWorkerInfo]) -> int:
    """Return how many R-worker threads of this machine share a core."""
    if not config.r_worker_spec.on_this_machine:
        return 1
    cores = config.r_core_list or usable_cores()
    return -(-sum(worker.num_threads for worker in r_workers) // len(cores))
