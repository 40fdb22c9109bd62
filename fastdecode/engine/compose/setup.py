"""Parts of an engine made from settings and loaded parts: threads, scheduler, and models of step times."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from fastdecode.api.config import EngineConfig
from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import SCRATCH_SHARE, usable_cores
from fastdecode.core.parked import Parks
from fastdecode.core.placing import UNLIMITED
from fastdecode.core.protocols import DraftPolicy, PrefillPolicy, StepTime
from fastdecode.core.state_room import StateRoom
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import RWorkerInfo
from fastdecode.cycle import Parking
from fastdecode.kinds.layout import KVLayout
from fastdecode.perfmodel.deployment import Deployment, check_alike, check_own, deployed_step_model, this_machine
from fastdecode.perfmodel.equations import token_budget
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.stages import MOVED_BYTES_PER_SECOND
from fastdecode.perfmodel.step_model import MeasuredStepTime, StepModel
from fastdecode.scheduler import SCHEDULES, Limits, Prefill, Scheduler
from fastdecode.scheduler.policy.draft_policy import BalancedDrafts
from fastdecode.sworker import SModel, SWorker
from fastdecode.sworker.model.loader import model_shape

logger = logging.getLogger(__name__)

CPU_TILE_TOKENS = 64
"""A token budget with a time target is a multiple of this number of tokens, with which products are fastest."""


def pin_s_worker(config: EngineConfig) -> int:
    """Bind this thread to the S-worker's cores, if ``config`` names any; return the number of threads to use."""
    if config.s_core_list:
        os.sched_setaffinity(0, config.s_core_list)
    return s_thread_count(config)


def s_thread_count(config: EngineConfig) -> int:
    """Return the number of threads for the S-worker's matrix products: by default one per core."""
    return config.s_threads or len(config.s_core_list or usable_cores())


def make_scheduler(
    config: EngineConfig,
    model: SModel,
    s_worker: SWorker,
    r_workers: Sequence[RWorkerInfo],
    num_mini_batches: int,
    scratch_tokens: int,
    prefill_policy: PrefillPolicy | None,
    state_room: StateRoom | None,
) -> Scheduler:
    """Return the scheduler for ``config``.
    Prompts of up to ``scratch_tokens`` tokens in all attend on the S-worker. If ``config`` sets a target time between
    tokens, step times come from a profile, or some steps are timed. ``prefill_policy``: None without prefill workers.
    ``state_room``: set if the S-worker keeps recurrent states.
    """
    schedule = SCHEDULES[config.schedule]
    budget = config.max_num_batched_tokens
    calibrated = live_step_model(config, model, r_workers, num_mini_batches) if config.profile else None
    if config.tbt_target is not None and schedule.prefill is Prefill.CHUNKED:
        step_time = calibrated or profile_steps(s_worker, r_workers, min(budget, model.max_model_len))
        budget = budget_within(config.tbt_target, step_time, config.max_num_seqs, budget)
    balanced = calibrated.balanced_kv_tokens_each(config.max_num_seqs) if calibrated else None
    num_blocks = tuple(worker.num_blocks for worker in r_workers)
    placing = config.placing.uncut
    if not model.layout.cannot("ranges"):
        placing = config.placing.chosen(
            model.max_model_len, num_blocks, config.block_size, balanced, model.layout.chunk_tokens
        )
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        num_mini_batches=num_mini_batches,
        scratch_tokens=scratch_tokens,
        max_model_len=model.max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        bandwidths=_bandwidths(r_workers),
        kv_load_limit=config.kv_load_limit,
        balanced_kv_tokens=balanced,
        idle_s_share=calibrated.idle_s_share(config.max_num_seqs) if calibrated else 1.0,
        micro_batch_interval=config.micro_batch_interval,
        prefix_caching=config.enable_prefix_caching,
        hosts=tuple(worker.host for worker in r_workers),
        seconds_per_moved_token=model.layout.kv_bytes_per_token / MOVED_BYTES_PER_SECOND,
        placing=placing,
        num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative else 0,
        state_blocks=max(worker.state_blocks for worker in r_workers),
        **_of_states_here(state_room, config.block_size * model.layout.room_bytes_per_token),
    )
    return Scheduler(schedule, limits, prefill_policy, _draft_policy(limits, calibrated))


def _of_states_here(room: StateRoom | None, block_bytes: int) -> dict[str, int]:
    """Return the ``Limits`` fields for recurrent states on the S-worker.
    ``block_bytes``: bytes of an R-worker's block.
    """
    if room is None:
        return {}
    return {"kept_states": room.kept, "state_worth_blocks": -(-room.state_bytes // block_bytes)}


def _draft_policy(limits: Limits, calibrated: StepModel | None) -> DraftPolicy | None:
    """Return the policy that decides how many tokens are drafted; None without drafting."""
    if not limits.num_speculative_tokens:
        return None
    return BalancedDrafts(limits.num_speculative_tokens, limits.num_mini_batches, calibrated)


def make_parking(
    config: EngineConfig, model: SModel, parks: Parks | None, r_workers: Sequence[RWorkerInfo], limits: Limits
) -> Parking | None:
    """Return the companion that parks prefixes of ``model`` on the disks of ``r_workers`` and of later ones.

    Return None without prefix caching. ``parks``: None if R-workers have no disks. Chains of ranges are of use only to
    an engine that cuts sequences at the same tokens.
    """
    if parks is None or not limits.prefix_caching:
        return None
    cut_at = limits.placing.segment_tokens
    identity = model.kv_identity if cut_at == UNLIMITED else f"{model.kv_identity}, cut at {cut_at} tokens"
    return Parking(parks, identity, r_workers)


def prompt_tokens(config: EngineConfig, model: SModel, r_workers: Sequence[RWorkerInfo]) -> int:
    """Return how many prompt tokens may attend on the S-worker at a time.
    A hybrid model has none, since R-workers hold its states. By default there are none if all R-workers share the
    S-worker's cores, since nothing could overlap.
    """
    shares_cores = not model.on_gpu and not any(worker.own_cores for worker in r_workers)
    if model.layout.cannot("scratch") or (config.prefill_scratch is None and shares_cores):
        return 0
    return scratch_tokens(config, model.layout, model.free_memory_bytes(), model.on_gpu)


def scratch_tokens(config: EngineConfig, layout: KVLayout, free_bytes: int, on_gpu: bool = False) -> int:
    """Return for how many prompt tokens the S-worker may hold keys and values in ``free_bytes``.
    They have the cache's dtype, but on a GPU the model's.
    """
    elements = sum(layer.kv_elements for layer in layout.layers)
    token_bytes = elements * ITEM_BYTES[layout.model_dtype] if on_gpu else layout.kv_bytes_per_token
    wanted = config.bytes_of("prefill_scratch")
    available = int(free_bytes * SCRATCH_SHARE) if wanted is None else wanted
    return available // token_bytes


def _bandwidths(r_workers: Sequence[RWorkerInfo]) -> tuple[float, ...]:
    """Return each R-worker's measured read bandwidth; equal numbers unless all R-workers measured theirs."""
    measured = tuple(worker.read_gb_per_s for worker in r_workers)
    return measured if all(measured) else (1.0,) * len(measured)


def budget_within(target_seconds: float, step_time: StepTime, least: int, most: int) -> int:
    """Return the most tokens of a step within ``target_seconds``: Sarathi-Serve's τ, from ``least`` to ``most``.
    ``least``: one token per decoding sequence. Raise ConfigError if even these take more than ``target_seconds``.
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
    """Time steps of one prompt chunk each, doubling up to ``most_tokens`` tokens; return the times.
    The steps run on the R-worker with most room, and leave no tokens in its cache.
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
    # An id of no other sequence: R-workers may hold any sequence of an earlier engine
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
    """Return ``config`` with latent absorption "r" if it is "auto" and R-workers are faster by the profile.
    Every rank comes to the same decision.
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
    """Return the model of this engine's steps from ``config.profile``.

    Raise ProfileError if the profile is of another machine or model.
    """
    profile = load_profile(str(config.profile))
    check_own(profile, this_machine(model.device_name, profile.machine.r_worker, r_workers[0].isa))
    shape, spec = model.shape, config.r_worker_spec
    check_alike(profile, shape)
    names = spec.addresses or (spec.kind,)
    deployment = Deployment(
        s_threads=1 if model.on_gpu else s_thread_count(config),
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
    # the R-worker with the slowest step decides
    return max(each, key=lambda steps: steps(tokens, tokens * model.max_model_len))


def _r_workers_per_core(config: EngineConfig, r_workers: Sequence[RWorkerInfo]) -> int:
    """Return how many R-worker threads of this machine share a core."""
    if not config.r_worker_spec.on_this_machine:
        return 1
    cores = config.r_core_list or usable_cores()
    return -(-sum(worker.num_threads for worker in r_workers) // len(cores))
