"""Makes the scheduler and other parts of an engine from its settings, and checks that settings and layers fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import SCRATCH_SHARE
from fastdecode.core.optional import optional
from fastdecode.core.parked import Parks
from fastdecode.core.placing import UNLIMITED
from fastdecode.core.protocols import DraftPolicy, PrefillPolicy, StepTime
from fastdecode.core.state_room import StateRoom
from fastdecode.core.types import RWorkerInfo
from fastdecode.cycle import Parking
from fastdecode.kinds import Way
from fastdecode.kinds.layout import KVLayout, may_cut
from fastdecode.scheduler import SCHEDULES, Limits, Prefill, Scheduler
from fastdecode.scheduler.schedules import MOVED_BYTES_PER_SECOND
from fastdecode.sworker import SModel, SWorker


def pin_s_worker(config: EngineConfig) -> int:
    """Bind this thread to the S-worker's cores, if ``config`` names any; return the number of threads to use."""
    if config.s_core_list:
        os.sched_setaffinity(0, config.s_core_list)
    return config.s_thread_count


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
    At most ``scratch_tokens`` prompt tokens at a time attend on the S-worker. If ``config`` has a target time between
    tokens, step times come from its profile; without a profile, some steps are timed now. ``prefill_policy``: None
    without prefill workers. ``state_room``: None if R-workers keep recurrent states.
    """
    schedule = SCHEDULES[config.schedule]
    budget = config.max_num_batched_tokens
    timed: Any = optional("timed steps") if config.profile or config.tbt_target is not None else None
    calibrated = timed.live_step_model(config, model, r_workers, num_mini_batches) if config.profile else None
    if config.tbt_target is not None and schedule.prefill is Prefill.CHUNKED:
        step_time = calibrated or timed.profile_steps(s_worker, r_workers, min(budget, model.max_model_len))
        budget = timed.budget_within(config.tbt_target, step_time, config.max_num_seqs, budget)
    balanced = calibrated.balanced_kv_tokens_each(config.max_num_seqs) if calibrated else None
    num_blocks = tuple(worker.num_blocks for worker in r_workers)
    placing = config.placing.uncut
    if may_cut(model.layout, config.kv_shard_tokens is not None):
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
        **_state_limits(state_room, config.block_size * model.layout.room_bytes_per_token),
    )
    return Scheduler(schedule, limits, prefill_policy, _draft_policy(limits, calibrated))


def _state_limits(room: StateRoom | None, block_bytes: int) -> dict[str, int]:
    """Return the fields of ``Limits`` about recurrent states on the S-worker; none if ``room`` is None.
    ``block_bytes``: bytes of an R-worker's block.
    """
    if room is None:
        return {}
    return {"kept_states": room.kept, "state_worth_blocks": -(-room.state_bytes // block_bytes)}


def _draft_policy(limits: Limits, calibrated: StepTime | None) -> DraftPolicy | None:
    """Return the policy that decides how many tokens are drafted; None without drafting."""
    if not limits.num_speculative_tokens:
        return None
    policy = optional("draft policy").BalancedDrafts
    return policy(limits.num_speculative_tokens, limits.num_mini_batches, calibrated)


def make_parking(
    config: EngineConfig, model: SModel, parks: Parks | None, r_workers: Sequence[RWorkerInfo], limits: Limits
) -> Parking | None:
    """Return the companion that parks prefixes on R-workers' disks, also those of R-workers that join later.

    Return None without prefix caching, for states in ranges, or if ``parks`` is None: R-workers have no disks then. An
    engine finds only prefixes that were parked with its own segment length.
    """
    cut_at = limits.placing.segment_tokens
    if parks is None or not limits.prefix_caching or (cut_at < UNLIMITED and model.layout.kept_apart):
        return None
    identity = model.kv_identity if cut_at == UNLIMITED else f"{model.kv_identity}, cut at {cut_at} tokens"
    return Parking(parks, identity, r_workers)


def prompt_tokens(config: EngineConfig, model: SModel, r_workers: Sequence[RWorkerInfo]) -> int:
    """Return how many prompt tokens may attend on the S-worker at a time; 0 if all prompts attend on R-workers.
    The number is 0 for a hybrid model, since R-workers hold its states. By default it is also 0 if all R-workers share
    the S-worker's cores, since then R-workers could not work at the same time.
    """
    shares_cores = not model.on_gpu and not any(worker.own_cores for worker in r_workers)
    if model.layout.cannot("scratch") or (config.prefill_scratch is None and shares_cores):
        return 0
    return scratch_tokens(config, model.layout, model.free_memory_bytes(), model.on_gpu)


def scratch_tokens(config: EngineConfig, layout: KVLayout, free_bytes: int, on_gpu: bool = False) -> int:
    """Return for how many prompt tokens the S-worker may hold keys and values, if ``free_bytes`` of memory are free.
    Keys and values have the cache's dtype, or the model's dtype on a GPU.
    """
    elements = sum(layer.kv_elements for layer in layout.layers)
    token_bytes = elements * ITEM_BYTES[layout.model_dtype] if on_gpu else layout.kv_bytes_per_token
    wanted = config.bytes_of("prefill_scratch")
    available = int(free_bytes * SCRATCH_SHARE) if wanted is None else wanted
    return available // token_bytes


def _bandwidths(r_workers: Sequence[RWorkerInfo]) -> tuple[float, ...]:
    """Return each R-worker's measured read bandwidth; 1.0 for every R-worker if any has not measured its own."""
    measured = tuple(worker.read_gb_per_s for worker in r_workers)
    return measured if all(measured) else (1.0,) * len(measured)


Asks = Callable[[EngineConfig, bool], bool]
"""A test whether settings use a feature; its second argument says whether the model is on a GPU."""


def _is_given(name: str, config: EngineConfig, on_gpu: bool) -> bool:
    return getattr(config, name) not in ("auto", None)


def _in_ranges(asks: Callable[[EngineConfig], bool]) -> Asks:
    """Return a test whether settings ask for ranges, and for what ``asks`` tests."""
    return lambda config, _: config.kv_shard_tokens is not None and asks(config)


ASKED: tuple[tuple[Way, str, Asks], ...] = (
    *(("states", name, partial(_is_given, name)) for name in ("mamba_ssm_cache_dtype", "state_on", "state_memory")),
    ("ranges", "kv_shard_tokens", lambda config, _: config.kv_shard_tokens is not None),
    ("tsp", "prefill_parallel", lambda config, _: config.prefill_parallel == "tsp"),
    ("ranks", "tensor_parallel_size", lambda config, _: config.tensor_parallel_size > 1),
    ("scratch", "prefill_scratch", lambda config, _: config.prefill_scratch is not None),
    (
        "early-exit drafts",
        "speculative_config",
        lambda config, _: config.speculative is not None and config.speculative.method == "early_exit",
    ),
    ("prefill workers", "prefill_workers", lambda config, _: config.prefill_workers is not None),
    ("states here", "state_on", lambda config, _: config.state_on == "s"),
    ("sessions", "keep_session", lambda config, _: config.keep_session > 0),
    ("copies", "kv_replicas", lambda config, _: config.kv_replicas > 1),
    ("audits", "audit", lambda config, _: config.audit > 0),
    ("gpu", "device", lambda _, on_gpu: on_gpu),
    (
        "states here, sessions",
        "keep_session",
        lambda config, _: config.state_on == "s" and config.keep_session > 0 and config.journal_folder is None,
    ),
    ("states here, parking", "park_dir", lambda config, _: config.state_on == "s" and config.park_dir is not None),
    (
        "states here, prefill workers",
        "prefill_workers",
        lambda config, _: config.state_on == "s" and config.prefill_workers is not None,
    ),
    (
        "states here, ranks",
        "tensor_parallel_size",
        lambda config, _: config.state_on == "s" and config.tensor_parallel_size > 1,
    ),
    ("states in ranges, ranks", "tensor_parallel_size", _in_ranges(lambda config: config.tensor_parallel_size > 1)),
    ("states in ranges, sessions", "keep_session", _in_ranges(lambda config: config.keep_session > 0)),
    ("states in ranges, parking", "park_dir", _in_ranges(lambda config: config.park_dir is not None)),
    (
        "states in ranges, prefill workers",
        "prefill_workers",
        _in_ranges(lambda config: config.prefill_workers is not None),
    ),
    (
        "states there, memory here",
        "state_memory",
        lambda config, _: config.state_on != "s" and config.state_memory is not None,
    ),
)
"""The feature, the setting that asks for it, and the test whether settings use the feature."""


def check_ways(config: EngineConfig, layout: KVLayout, on_gpu: bool) -> None:
    """Raise ConfigError for a setting whose feature the layers of ``layout`` do not support."""
    if reason := layout.cannot_lie_in(config.block_size):
        raise ConfigError(f"block_size: {reason}")
    for way, setting, asks in ASKED:
        if asks(config, on_gpu) and (reason := layout.cannot(way)):
            raise ConfigError(f"{setting}: {reason}")
