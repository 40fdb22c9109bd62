"""The policy that decides which prompts prefill workers compute, and the step times that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fastdecode.api.config import EngineConfig
from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.core.protocols import PrefillPolicy
from fastdecode.core.types import RWorkerInfo
from fastdecode.engine.compose.timed_steps import profile_steps
from fastdecode.perfmodel.partition import Forecast
from fastdecode.perfmodel.prefill_rates import MANY_ROWS, TILE_ROWS, measured_forecast
from fastdecode.perfmodel.prefill_times import PrefillLink, PrefillTimes, PromptAttentionTimes
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.stages import MeasuredSPart
from fastdecode.scheduler.policy.prefill_policy import LeastWaiting
from fastdecode.sworker import SModel, SWorker
from fastdecode.sworker.part.attention import (
    TIMED_ROWS,
    MakeCache,
    StoredAttention,
    TorchAttention,
    attention_pair_seconds,
)


def make_prefill_policy(
    config: EngineConfig,
    model: SModel,
    s_worker: SWorker,
    r_workers: Sequence[RWorkerInfo],
    num_workers: int,
    cache_maker: Callable[[int], MakeCache],
) -> PrefillPolicy:
    """Return the policy that assigns prompts to ``num_workers`` prefill workers or to the S-worker.

    ``cache_maker``: takes a number of tokens, and returns a function that makes caches for as many.
    """
    here = timed_prefill_model(config, model, s_worker, r_workers, cache_maker(2 * TIMED_ROWS))
    profile = load_profile(config.profile) if config.profile else None
    # Without a measurement, the link from R-workers to prefill workers is assumed to be slow. Then the S-worker itself
    # computes a few tokens after a long cached prefix, so that no prefill worker need fetch that prefix.
    unmeasured_link = PrefillLink(1e9)
    if profile and profile.prefill:
        forecast = measured_forecast(profile, num_workers, config.prefill_parallel, config.kv_cache_dtype)
    else:
        linked = replace(_with_threads(here, config), link=unmeasured_link)
        forecast = Forecast(linked, method=config.prefill_parallel)
    return LeastWaiting(forecast, _s_seconds(here), range(num_workers))


def timed_prefill_model(
    config: EngineConfig, model: SModel, s_worker: SWorker, r_workers: Sequence[RWorkerInfo], make_cache: MakeCache
) -> PrefillTimes:
    """Return forecasts for a prefill worker that is as fast as this S-worker, from timing a short prompt here."""
    layout = model.layout
    room = max(worker.room_tokens for worker in r_workers)
    timed_tokens = 256
    num_tokens = min(timed_tokens, model.max_model_len, room, config.max_num_batched_tokens)
    seconds = profile_steps(s_worker, r_workers, num_tokens)(num_tokens, 0) / len(layout.layers)
    attention = PromptAttentionTimes(_pair_seconds(model, make_cache), TILE_ROWS)
    per_row = max(seconds - attention.seconds(num_tokens, 0), seconds / 2) / num_tokens
    elements = max(layer.kv_elements for layer in model.whole_layout.layers)
    s_part = MeasuredSPart((1, MANY_ROWS), (per_row, per_row * MANY_ROWS), (0.0, 0.0))
    return PrefillTimes(
        len(layout.layers), s_part, attention, elements * ITEM_BYTES[layout.model_dtype],
        stored_kv_bytes=max(layer.token_bytes(layout.kv_dtype) for layer in layout.layers),
    )  # fmt: skip


def _pair_seconds(model: SModel, make_cache: MakeCache) -> float:
    """Return the seconds that prompt attention takes per pair of a query and a key."""
    layout = model.layout.absorbed
    attention = (TorchAttention if model.on_gpu else StoredAttention)(layout, make_cache)
    try:
        return attention_pair_seconds(attention, layout, model.code.device)
    finally:
        attention.close()


def _with_threads(model: PrefillTimes, config: EngineConfig) -> PrefillTimes:
    """Return ``model``, measured on the S-worker, with the times that prefill workers are expected to need.
    A spawned prefill worker may have another number of threads. With tensor parallelism, a prefill worker computes the
    whole model, and a rank only its shard.
    """
    spec = config.prefill_worker_spec
    slower = config.s_thread_count / config.prefill_thread_count if spec and spec.kind == "spawn" else 1.0
    return model.times(slower * config.tensor_parallel_size)


def _s_seconds(model: PrefillTimes) -> Callable[[int, int], float]:
    """Return a function from a prompt's new and cached tokens to the seconds that the S-worker needs for it.
    An R-worker attends to the cached tokens; its attention is assumed to be as fast as the S-worker's.
    """
    return lambda num_tokens, context_len: model.alone_seconds(num_tokens, context_len=context_len)
