"""The composition root: makes all parts of an engine from its settings."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.api.request import InFlight
from fastdecode.core.dtypes import is_quantized
from fastdecode.core.errors import BackendError
from fastdecode.core.machine import usable_cores
from fastdecode.core.metrics import StateClock
from fastdecode.core.optional import optional
from fastdecode.core.protocols import AttentionBackend, PrefillBackend, RanksBackend
from fastdecode.core.state_room import StateRoom
from fastdecode.core.types import RWorkerInfo
from fastdecode.cycle import Companion, Membership, Parking
from fastdecode.engine.compose.backends import (
    check_room,
    keep_states_here,
    make_backend,
    make_prefill_backend,
    parks_of,
    place_on_ray,
    pool_layout,
    prepare,
    with_key_of,
)
from fastdecode.engine.compose.outliving import make_journal, resume_session
from fastdecode.engine.compose.own_caches import common_isa, layer_cache_maker, make_draft_backend, make_prompt_backend
from fastdecode.engine.compose.setup import (
    check_ways,
    make_parking,
    make_scheduler,
    pin_s_worker,
    prompt_tokens,
)
from fastdecode.engine.live import LiveRequests, LiveWorld
from fastdecode.journal.journal import next_run
from fastdecode.journal.records import Run
from fastdecode.kinds.layout import KVLayout
from fastdecode.scheduler import Scheduler
from fastdecode.sworker import PromptCache, SModel, SWorker, set_threads
from fastdecode.sworker.run.s_worker import Lead

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The parts of an engine; the cycle calls the ``companions`` among them. ``config``: the settings of this rank."""

    config: EngineConfig
    s_model: SModel
    num_mini_batches: int
    scheduler: Scheduler
    world: LiveWorld
    requests: LiveRequests
    membership: Membership
    prefills: Any
    speculation: Any
    parking: Parking | None

    @property
    def companions(self) -> tuple[Companion, ...]:
        """The parts that the cycle calls before and after each step, in the order of the calls."""
        return tuple(each for each in (self.membership, self.parking, self.prefills, self.speculation) if each)


@dataclass(frozen=True)
class _Pool:
    """The R-workers after they have allocated caches for a model.
    ``ranks``: ``backend`` itself if several ranks share the model, else None. ``state_room``: memory for recurrent
    states if the S-worker keeps them, else None.
    """

    backend: AttentionBackend
    ranks: RanksBackend | None
    layout: KVLayout
    r_workers: list[RWorkerInfo]
    state_room: StateRoom | None


def build(config: EngineConfig, backend: AttentionBackend | None, cleanup: ExitStack) -> Parts:
    """Load the model, open its R-workers (``backend``, or those in ``config``) and join all parts.

    ``cleanup`` frees what was started, also after an error. Raise the FastDecodeError of any part. With tensor
    parallelism, only rank 0 returns: the other ranks compute here until the job ends.
    """
    if config.profile:
        config = optional("timed steps").with_absorption(config)
    if config.tensor_parallel_size > 1:
        optional("ranks").follow(config)
    if backend is None:
        prepare(config)
    r_cores = usable_cores()
    cleanup.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
    ray_job = None if backend else place_on_ray(config)  # before the model is loaded, since this may fail
    if ray_job:
        cleanup.callback(ray_job.end)
        config = with_key_of(ray_job, config, cleanup)
    prefill_backend = make_prefill_backend(config)  # prefill workers load their models while this process continues
    if prefill_backend:
        cleanup.callback(prefill_backend.close)
    ranks = optional("ranks").Ranks(config) if config.tensor_parallel_size > 1 else None
    if ranks:
        cleanup.callback(ranks.close)
        config = ranks.config
    set_threads(pin_s_worker(config))
    model = SModel(config, ranks.rank if ranks else None)
    check_ways(config, model.layout, model.on_gpu)
    cores = config.r_core_list or r_cores

    def open_pool(run: Run, insists: bool, opening: ExitStack) -> _Pool:
        if ranks:
            ranks.tell(run)
        own = backend or make_backend(config, cores, prefill_backend, ray_job, model.identity_of_part, run, insists)
        return _open(config, model, own, ranks, opening)

    pool, run = _first_pool(config, open_pool, cleanup)
    return _put_together(config, model, pool, prefill_backend, run, cleanup)


def _first_pool(
    config: EngineConfig, open_pool: Callable[[Run, bool, ExitStack], _Pool], cleanup: ExitStack
) -> tuple[_Pool, Run]:
    """Return the result of ``open_pool``, and the journal's run. A standby retries until it gets the session.
    R-workers refuse a standby while the earlier S-worker runs. With a journal folder, the standby takes the session
    (``insists``) once the heartbeat in that folder stops. Without a folder, it waits until the R-workers drop the
    earlier S-worker, which has ended or is silent.
    """
    folder = config.journal_folder if config.stands_by else None
    pulse = optional("pulse").Listening(folder) if folder else None
    reason = ""
    # Seconds between two attempts of a standby to open its session
    standby_seconds = 0.25
    while True:
        run = next_run(config.journal_folder)
        with ExitStack() as opening:
            try:
                insists = pulse.is_silent() if pulse else not config.stands_by
                pool = open_pool(run, insists, opening)
                cleanup.push(opening.pop_all())
                return pool, run
            except BackendError as error:
                if not config.stands_by:
                    raise
                if str(error) != reason:
                    reason = str(error)
                    logger.warning("stands by for session %s: %s", config.session, reason)
        time.sleep(standby_seconds)


def _open(config: EngineConfig, model: SModel, own: AttentionBackend, ranks: Any, cleanup: ExitStack) -> _Pool:
    """Open the R-workers of ``own``, or those of all ``ranks`` (``Ranks``, or None), with caches for ``model``."""
    shared = ranks.backend(own) if ranks else None
    backend = shared or own
    cleanup.callback(backend.close)
    layout = pool_layout(config, model.layout, ranks is None or ranks.on_one_machine)
    state_room = keep_states_here(config, backend, layout, model.max_model_len)
    r_workers = backend.open(layout)
    check_room(config, model.max_model_len, model.layout, r_workers)
    return _Pool(backend, shared, layout, r_workers, state_room)


def _put_together(
    config: EngineConfig,
    model: SModel,
    pool: _Pool,
    prefill_backend: PrefillBackend | None,
    run: Run,
    cleanup: ExitStack,
) -> Parts:
    own_cores = model.on_gpu or any(worker.own_cores for worker in pool.r_workers)
    num_mini_batches = config.num_mini_batches or (2 if own_cores else 1)
    scratch_tokens = prompt_tokens(config, model, pool.r_workers)
    if pool.ranks:
        pool.ranks.begin_prompts(scratch_tokens)
    prompts = _make_prompts(config, model, pool, scratch_tokens, cleanup)
    s_worker = _make_s_worker(config, model, pool, prompts, num_mini_batches)
    in_flight = InFlight()
    lead = partial(pool.ranks.lead, by="first layers") if pool.ranks else None
    speculation = _make_speculation(config, model, s_worker, num_mini_batches, in_flight, cleanup, lead)
    prefill_policy = None
    if prefill_backend:
        whole = replace(model.whole_layout, isa=common_isa(pool.r_workers))
        kv_heads = [layer.num_kv_heads for layer in model.layout.layers]
        num_workers = prefill_backend.open(model.identity, model.max_model_len, model.vocab_size, whole, kv_heads)
        prefill_policy = optional("prefill policy").make_prefill_policy(
            config, model, s_worker, pool.r_workers, num_workers, partial(layer_cache_maker, config)
        )
    scheduler = make_scheduler(
        config, model, s_worker, pool.r_workers, num_mini_batches, scratch_tokens, prefill_policy, pool.state_room
    )
    fingerprint = f"{model.identity} {model.layout.kv_dtype} {model.layout.state_dtype} {config.seed}"
    journal = make_journal(config, fingerprint, pool.backend, pool.r_workers, run, cleanup)
    resume_session(scheduler, pool.r_workers, journal, config.keep_session > 0)
    prefills = None
    if prefill_backend:
        prefills = optional("remote prefills").RemotePrefills(prefill_backend, pool.r_workers, config.prefill_parallel)
    in_ranges = scheduler.limits.placing.segment_tokens < model.max_model_len
    world = LiveWorld(pool.backend, s_worker, pool.r_workers, in_flight, prefills, pool.ranks, in_ranges)
    requests = LiveRequests(in_flight, model.eos_token_ids, s_worker.clock, journal)
    membership = Membership(world.now(), [worker.name for worker in pool.r_workers])
    own_parks = parks_of(pool.ranks.pool if pool.ranks else pool.backend)
    parks = pool.ranks.parks(own_parks) if pool.ranks and own_parks else own_parks
    parking = make_parking(config, model, parks, pool.r_workers, scheduler.limits)
    return Parts(
        config, model, num_mini_batches, scheduler, world, requests, membership, prefills, speculation, parking
    )


def _make_prompts(
    config: EngineConfig, model: SModel, pool: _Pool, num_tokens: int, cleanup: ExitStack
) -> PromptCache | None:
    """Return a cache on this process's cores, which attends up to ``num_tokens`` prompt tokens.
    Return None if R-workers attend all prompts, or if torch does so on a GPU.
    """
    if model.on_gpu and num_tokens and is_quantized(pool.layout.kv_dtype):
        logger.warning(
            "prompts attend on the GPU, and R-workers also round queries for kv_cache_dtype %s: tokens may depend on "
            "where a prompt attends; with prefill_scratch 1 all attend on R-workers",
            pool.layout.kv_dtype,
        )
    if model.on_gpu or not num_tokens:
        return None
    backend = make_prompt_backend(config, pool.layout, num_tokens, pool.r_workers)
    cleanup.callback(backend.close)
    return PromptCache(backend)


def _make_s_worker(
    config: EngineConfig, model: SModel, pool: _Pool, prompts: PromptCache | None, num_mini_batches: int
) -> SWorker:
    """Return the S-worker of ``model``. With several ranks it computes this rank's part and leads the other ranks."""
    clock = StateClock()
    if pool.ranks:
        lead = pool.ranks.lead
        return SWorker(model.code, model.layout, pool.backend, clock, prompts=prompts, lead=lead, in_order=True)
    s_worker = SWorker(model.code, model.layout, pool.backend, clock, prompts=prompts)
    if not config.enforce_eager:
        s_worker.capture_graphs(num_mini_batches, config.max_num_seqs)
    return s_worker


def _make_speculation(
    config: EngineConfig,
    model: SModel,
    s_worker: SWorker,
    num_mini_batches: int,
    in_flight: InFlight,
    cleanup: ExitStack,
    lead: Lead | None,
) -> Any:
    """Return the companion that drafts tokens for the requests ``in_flight``; None without speculative decoding.
    ``lead``: see ``make_drafter``.
    """
    if config.speculative is None:
        return None
    make_own_backend = partial(make_draft_backend, config, max_model_len=model.max_model_len)
    drafter = optional("drafters").make_drafter(
        config, config.speculative, model, s_worker, num_mini_batches, make_own_backend, cleanup, lead
    )
    return optional("speculation").Speculation(drafter, in_flight, s_worker.clock)
