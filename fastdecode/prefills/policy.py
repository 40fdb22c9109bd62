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
    """Return the policy that assigns prompts to ``num_workers`` prefill workers or the S-worker.

    ``cache_maker``: for a number of tokens, returns a function that makes caches on the S-worker's threads.
    """
    here = timed_prefill_model(config, model, s_worker, r_workers, cache_maker(2 * TIMED_ROWS))
    profile = load_profile(config.profile) if config.profile else None
    # The link assumed from R-workers to prefill workers if no profile has measured one. At this speed, the S-worker
    # itself computes a few tokens after a long prefix, since an R-worker already has that prefix.
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
    """Return step times of the S-worker as if it were a prefill worker, measured with a short prompt."""
    layout = model.layout
    room = max(worker.room_tokens for worker in r_workers)
    # Tokens of the prompt that is timed on the S-worker at the start
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
    """Return the attention seconds of a prompt part per pair of a query and a key."""
    layout = model.layout.absorbed
    attention = (TorchAttention if model.on_gpu else StoredAttention)(layout, make_cache)
    try:
        return attention_pair_seconds(attention, layout, model.code.device)
    finally:
        attention.close()


def _with_threads(model: PrefillTimes, config: EngineConfig) -> PrefillTimes:
    """Return ``model`` scaled from the S-worker's threads to those of spawned prefill workers.
    Each prefill worker has the whole model, not a rank's part. Remote prefill workers count as equal to a rank's
    process until they have computed a prompt.
    """
    spec = config.prefill_worker_spec
    slower = config.s_thread_count / config.prefill_thread_count if spec and spec.kind == "spawn" else 1.0
    return model.times(slower * config.tensor_parallel_size)


def _s_seconds(model: PrefillTimes) -> Callable[[int, int], float]:
    """Return a function that gives the seconds of a prompt on the S-worker.
    An R-worker attends to the prompt's cached prefix. It is assumed to be as fast as the S-worker.
    """
    return lambda num_tokens, context_len: model.alone_seconds(num_tokens, context_len=context_len)
