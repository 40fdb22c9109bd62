"""From settings and what was loaded to the scheduler over it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastdecode.config import EngineConfig
from fastdecode.errors import ConfigError
from fastdecode.live_profile import live_step_model
from fastdecode.perfmodel.equations import token_budget
from fastdecode.perfmodel.stages import MOVED_BYTES_PER_SECOND
from fastdecode.perfmodel.step_model import MeasuredStepTime
from fastdecode.protocols import StepTime
from fastdecode.resources import scratch_tokens
from fastdecode.scheduler import POLICIES, Limits, Scheduler
from fastdecode.scheduler.policy import Prompts
from fastdecode.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.sworker import SModel, SWorker
from fastdecode.types import RWorkerInfo

TILE_TOKENS = 64
"""A token budget that is to keep a target is a multiple of this: matrix products are at their best there."""


def make_scheduler(
    config: EngineConfig, model: SModel, s_worker: SWorker, r_workers: Sequence[RWorkerInfo], num_mini_batches: int
) -> Scheduler:
    """The scheduler that ``config`` asks for; where it names a time between tokens, a profile says what steps take, or
    some are timed for it."""
    policy = POLICIES[config.schedule]
    budget = config.max_num_batched_tokens
    calibrated = live_step_model(config, model, r_workers, num_mini_batches) if config.profile else None
    if config.tbt_target is not None and policy.prompts is Prompts.CHUNKED:
        room = min(worker.num_blocks for worker in r_workers) * config.block_size
        step_time = calibrated or profile_steps(s_worker, len(r_workers), min(budget, model.max_model_len, room))
        budget = budget_within(config.tbt_target, step_time, config.max_num_seqs, budget)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        num_mini_batches=num_mini_batches,
        scratch_tokens=_scratch_tokens(config, model, r_workers),
        max_model_len=model.max_model_len,
        block_size=config.block_size,
        num_blocks=tuple(worker.num_blocks for worker in r_workers),
        bandwidths=_bandwidths(r_workers),
        kv_load_limit=config.kv_load_limit,
        balanced_kv_tokens=calibrated.balanced_kv_tokens_each(config.max_num_seqs) if calibrated else None,
        idle_s_share=calibrated.idle_s_share(config.max_num_seqs) if calibrated else 1.0,
        micro_batch_interval=config.micro_batch_interval,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_moved_token=model.layout.kv_bytes_per_token / MOVED_BYTES_PER_SECOND,
    )
    return Scheduler(policy, limits)


def _scratch_tokens(config: EngineConfig, model: SModel, r_workers: Sequence[RWorkerInfo]) -> int:
    """Prompt tokens that may attend on the S-worker.

    Unless told otherwise none, where all R-workers share its cores and store keys and values as the model computes
    them: there is nothing to overlap, and torch's attention takes two to three times as long as theirs.
    """
    shares_cores = not model.on_gpu and not any(worker.own_cores for worker in r_workers)
    if config.prefill_scratch is None and shares_cores and model.layout.kv_dtype == model.layout.model_dtype:
        return 0
    return scratch_tokens(config, model.layout, model.free_memory_bytes())


def _bandwidths(r_workers: Sequence[RWorkerInfo]) -> tuple[float, ...]:
    """What each R-worker measured it can read, where all of them did; else they count as equal."""
    measured = tuple(worker.read_gb_per_s for worker in r_workers)
    return measured if all(measured) else (1.0,) * len(measured)


def budget_within(target_seconds: float, step_time: StepTime, least: int, most: int) -> int:
    """Sarathi-Serve's τ, from ``least`` tokens, one for each sequence that may decode, to ``most``.

    ConfigError when not even ``least`` tokens take at most ``target_seconds``.
    """
    if step_time(least, 0) > target_seconds:
        raise ConfigError(
            f"tbt_target: a step of {least} tokens, one for each of max_num_seqs, takes {step_time(least, 0):.3g} s: "
            f"give at least that instead of {target_seconds:.3g} s, or lower max_num_seqs"
        )
    if most < TILE_TOKENS or step_time(TILE_TOKENS, 0) > target_seconds:
        return least
    return max(least, token_budget(step_time, target_seconds, tile_tokens=TILE_TOKENS, most_tokens=most))


def profile_steps(s_worker: SWorker, num_r_workers: int, most_tokens: int) -> MeasuredStepTime:
    """Time steps of one prompt chunk each, doubling up to ``most_tokens`` tokens; nothing of them stays anywhere."""
    largest = min(TILE_TOKENS, max(most_tokens, 2))
    counts = [largest // 2, largest]
    while 2 * counts[-1] <= most_tokens:
        counts.append(2 * counts[-1])
    return MeasuredStepTime(counts, [_step_seconds(s_worker, num_r_workers, count) for count in counts])


def _step_seconds(s_worker: SWorker, num_r_workers: int, num_tokens: int) -> float:
    """The faster of two steps that compute ``num_tokens`` of a prompt."""
    chunk = Chunk(0, 0, 0, [0] * num_tokens, attends=False, samples=False, is_decode=False)
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
