"""Construction of the attention backend from the settings: R-workers, their cores and memory, and checks of these."""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastdecode.api.config import EngineConfig, prefill_settings
from fastdecode.api.settings import ON_R_WORKERS, WorkerSpec, is_loopback, split_address
from fastdecode.core.errors import BackendError, CapacityError
from fastdecode.core.machine import KV_CACHE_SHARE, STATE_SHARE, available_memory_bytes, usable_cores
from fastdecode.core.optional import optional
from fastdecode.core.parked import Parks
from fastdecode.core.protocols import AttentionBackend, PrefillBackend
from fastdecode.core.state_room import StateRoom
from fastdecode.core.types import RWorkerInfo
from fastdecode.journal.places import Place
from fastdecode.journal.records import Run
from fastdecode.kinds.layout import KVLayout, may_cut

if TYPE_CHECKING:
    from fastdecode.cluster.pool.backend import PoolBackend
    from fastdecode.cluster.pool.joining import JoinListener
    from fastdecode.cluster.r_worker.tuning import Tuning

logger = logging.getLogger(__name__)


def make_backend(
    config: EngineConfig,
    cores: list[int],
    prefill_workers: PrefillBackend | None = None,
    ray_job: Any = None,
    model: str = "",
    run: Run | None = None,
    insists: bool = True,
) -> AttentionBackend:
    """Return a backend over the R-workers in ``config.r_workers``; R-workers of this machine run on ``cores``.
    If R-workers may join, a listener accepts them. It also passes prefill workers that join to ``prefill_workers``.
    ``model``: the model's identity. ``run``: the journal's run. R-workers that keep a session compare both with the
    session, to decide whether this engine may continue it. ``insists``: take the session even from an S-worker that is
    only silent; otherwise only from one that has stopped. ``ray_job``: from ``place_on_ray``.
    """
    ray_job = ray_job or place_on_ray(config)
    listener: JoinListener | None = None
    if ray_job:
        pool: PoolBackend = optional("Ray pool").RayBackend(ray_job)
        address = config.pool_listen or f"{ray_job.host}:0"
        listener = optional("TCP pool").join_listener(
            address, config.block_size, ray_job.security, config.silence_seconds
        )
    else:
        pool = _make_pool(config, cores, model, run or Run("", ""), insists)
        if config.pool_listen:
            guard = config.key_file, config.security, config.silence_seconds
            listener = optional("TCP pool").listen_for_joins(config.pool_listen, config.block_size, *guard)
    if listener:
        logger.info("R-workers may join at %s", listener.address)
        if (config.pool_listen or "").endswith(":0"):
            print(f"fastdecode: R-workers may join at {listener.address}", file=sys.stderr, flush=True)
        if prefill_workers:
            listener.invite_prefill_worker = prefill_workers.invite
        pool.accept_joins(listener)
    if config.wait_for_r_workers and config.tensor_parallel_size == 1:
        pool.take_back()
    pool.set_audit(config.audit, config.seed)
    return pool


def place_on_ray(config: EngineConfig) -> Any:
    """Reserve room for R-workers in a Ray cluster. Return the ``RayJob``, or None if ``config`` asks for none.

    Raise CapacityError if there is no room. The caller must end the job, unless ``make_backend`` gets it.
    """
    spec = config.r_worker_spec
    if spec.kind != "ray":
        return None
    memory = config.bytes_of("kv_cache_memory")
    return optional("Ray pool").RayJob(
        spec.count, config.r_threads, memory, spec.strict_spread, config.key_file, config.security
    )


def with_key_of(ray_job: Any, config: EngineConfig, cleanup: ExitStack) -> EngineConfig:
    """Return ``config`` with the ``RayJob``'s key in a temporary file, if prefill workers need a key file.
    ``cleanup`` removes the file.
    """
    if config.prefill_workers is None or config.key_file or ray_job.security.secret is None:
        return config
    path = Path(cleanup.enter_context(tempfile.TemporaryDirectory())) / "key"
    path.touch(0o600)
    path.write_bytes(ray_job.security.secret)
    return replace(config, key_file=str(path), security="encrypt" if ray_job.security.encrypts else "authenticate")


def parks_of(backend: AttentionBackend) -> Parks | None:
    """Return access to the disks on which R-workers of ``backend`` park prefixes; None if they cannot be reached."""
    from fastdecode.cluster.pool.backend import PoolBackend, PoolParks

    return PoolParks(backend) if isinstance(backend, PoolBackend) else None


def journal_copies(backend: AttentionBackend) -> Place:
    """Return a ``Place`` for a journal in R-workers' memory. Raise BackendError if ``backend`` cannot reach it."""
    from fastdecode.cluster.pool.backend import PoolBackend

    if not isinstance(backend, PoolBackend):
        raise BackendError(f"journal: {ON_R_WORKERS} works with a single S-worker process only: give a folder instead")
    return optional("journal copies").JournalCopies(backend)


def pool_layout(config: EngineConfig, layout: KVLayout, ranks_on_one_machine: bool = True) -> KVLayout:
    """Return ``layout``, of a whole model or a rank's shard, with the settings that R-workers need from ``config``."""
    told = replace(layout, isa=config.uniform_arithmetic, kv_port=_kv_port(config, ranks_on_one_machine))
    num_drafts = config.speculative.num_speculative_tokens if config.speculative else 0
    told = told.keeping(1 + num_drafts) if num_drafts or config.kv_replicas > 1 else told
    # early exit abandons steps, after which R-workers must restore recurrent states
    exits_early = config.speculative is not None and config.speculative.method == "early_exit"
    return told.outliving() if config.keep_session or exits_early else told


def _kv_port(config: EngineConfig, ranks_on_one_machine: bool) -> Literal["", "loopback", "any"]:
    """Return the addresses on which R-workers accept keys and values from prefill workers; see ``KVLayout.kv_port``."""
    spec = config.prefill_worker_spec
    if spec is None:
        return ""
    joining = split_address("pool_listen", config.pool_listen, 0)[0] if config.pool_listen else "localhost"
    near = ranks_on_one_machine and _is_near(spec) and _is_near(config.r_worker_spec) and is_loopback(joining)
    return "loopback" if near else "any"


def _is_near(spec: WorkerSpec) -> bool:
    """Return whether all workers of ``spec`` are on this machine, where its loopback reaches them."""
    if spec.kind == "ray":
        return False
    if spec.kind == "mpi":
        return bool(optional("MPI job").join_as_s_worker().is_on_one_machine)
    return all(is_loopback(split_address("workers", each)[0]) for each in spec.addresses)


def make_prefill_backend(config: EngineConfig) -> PrefillBackend | None:
    """Return the prefill workers in ``config.prefill_workers``, or None. Spawned ones start to load their models."""
    spec = config.prefill_worker_spec
    if spec is None:
        return None
    from fastdecode.cluster.wire.handshake import read_security

    security, workers = read_security(config.key_file, config.security), optional("prefill workers")
    if spec.kind == "tcp":
        return workers.listening_workers(spec.addresses, security)
    if spec.kind == "mpi":
        return workers.ranked_workers(security)
    cores = config.prefill_core_list or usable_cores()
    threads = config.prefill_thread_count
    settings = {name: getattr(config, name) for name in prefill_settings()}
    return workers.spawned_workers(spec.count, settings, threads, cores, config.key_file, security)


def tuning() -> Tuning:
    """Return the tuning of this machine's R-workers; see :func:`fastdecode.cluster.r_worker.tuning.tuning`."""
    from fastdecode.cluster.r_worker import tuning as measured

    return measured.tuning()


def keep_states_here(
    config: EngineConfig, backend: AttentionBackend, layout: KVLayout, max_model_len: int
) -> StateRoom | None:
    """Keep recurrent states in this process instead of on R-workers, if ``config.state_on`` is "s".
    Return the memory reserved for states, or None. Call this before ``backend`` is opened. Raise CapacityError if the
    memory is too small for the states of all sequences in flight: one for each range of up to ``max_model_len`` tokens.
    """
    if config.state_on != "s":
        return None
    from fastdecode.cluster.pool.backend import PoolBackend

    if not isinstance(backend, PoolBackend):
        raise BackendError("state_on: 's' works with a single S-worker process only: give 'r' instead")
    pairs = optional("state pairs")
    memory = config.bytes_of("state_memory") or int(available_memory_bytes() * STATE_SHARE)
    num_ranges = -(-max_model_len // (config.kv_shard_tokens or max_model_len))
    each = config.kv_replicas * num_ranges
    room = StateRoom.of(memory, pairs.LayerParts.of(layout).state_bytes, config.max_num_seqs, each)
    cores = config.s_core_list or usable_cores()
    num_kept = config.max_num_seqs * num_ranges + room.kept
    folder = Path(config.journal_folder, "states") if config.keep_session and config.journal_folder else None
    backend.keep_states(pairs.StateKeeper(num_kept, config.s_thread_count, tuple(cores), folder))
    return room


def _make_pool(config: EngineConfig, cores: list[int], model: str, run: Run, insists: bool) -> PoolBackend:
    spec = config.r_worker_spec
    if spec.kind == "tcp":
        return _listening_pool(config, model, run, insists)
    if spec.kind == "join":
        return optional("TCP pool").JoiningBackend(spec.count)
    if spec.kind == "mpi":
        return optional("MPI pool").MpiBackend(config.block_size)
    from fastdecode.cluster.r_worker.host import RWorkerSize

    num_bytes = kv_cache_bytes(config)
    num_threads = config.r_threads or max(1, len(cores) // spec.count)
    turns = itertools.cycle(cores)
    sizes = [
        RWorkerSize(num_bytes, num_threads, tuple(itertools.islice(turns, num_threads))) for _ in range(spec.count)
    ]
    if spec.kind == "spawn":
        guard = config.key_file, config.security, config.silence_seconds
        return optional("spawned pool").SpawnBackend(sizes, config.block_size, *guard, config.park)
    from fastdecode.cluster.pool.inproc import InprocBackend
    from fastdecode.cluster.wire.handshake import read_security

    security = read_security(config.key_file, config.security)
    return InprocBackend(sizes, config.block_size, config.separate_cores, security, config.park)


def _listening_pool(config: EngineConfig, model: str, run: Run, insists: bool) -> PoolBackend:
    """Return a pool of R-workers that listen for connections; they continue the session that ``config`` names."""
    from fastdecode.cluster.wire.leases import AskedLease

    this, before = f"{model} {run.name}", f"{model} {run.before}" if run.before else ""
    lease = None
    if config.session:
        any_run = config.journal == ON_R_WORKERS
        before = f"{model} " if any_run else before
        lease = AskedLease(config.session, this, before, config.keep_session, waits=not insists, any_run=any_run)
    may_miss = config.keep_session > 0 and config.tensor_parallel_size == 1
    guard = config.key_file, config.security, config.silence_seconds
    addresses = config.r_worker_spec.addresses
    return optional("TCP pool").TcpBackend(addresses, config.block_size, *guard, lease, config.stands_by, may_miss)


def prepare(config: EngineConfig) -> None:
    """Prepare what an engine needs before it loads its model. Raise ConfigError for settings that would fail later.
    Check the environment variables of R-workers on this machine. In an MPI job, join the job before the model is
    loaded: then the other ranks do not wait for the model, and they end with this process if loading fails.
    """
    spec, prefill = config.r_worker_spec, config.prefill_worker_spec
    if config.in_mpi_job:
        num_ranks = prefill.count if prefill and prefill.kind == "mpi" else 0
        optional("MPI job").join_as_s_worker().begin(spec.kind == "mpi", num_ranks, config.key_file)
    if spec.on_this_machine:
        from fastdecode.cluster.r_worker.tuning import forced_isa, forced_read_ahead

        forced_isa()
        forced_read_ahead()
    if spec.kind == "ray":
        optional("Ray pool").check_installed()


def kv_cache_bytes(config: EngineConfig) -> int:
    """Return the size of the KV cache of each R-worker on this machine, in bytes."""
    wanted = config.bytes_of("kv_cache_memory")
    return wanted or int(available_memory_bytes() * KV_CACHE_SHARE) // config.num_r_workers


def check_room(config: EngineConfig, max_model_len: int, layout: KVLayout, workers: Sequence[RWorkerInfo]) -> None:
    """Raise CapacityError unless each R-worker, or all together, can hold a sequence of ``max_model_len`` tokens.
    The message says how much memory is needed. Raise ConfigError if ``config`` wants two copies and there is one
    R-worker.
    """
    placing = config.placing
    if not config.pool_listen:
        # The configured number counts too, since some of these R-workers may be lost at present.
        placing.check_r_workers(max(len(workers), config.num_r_workers))
    num_blocks, fixed = [worker.num_blocks for worker in workers], max(worker.state_blocks for worker in workers)
    one_piece = not may_cut(layout, config.kv_shard_tokens is not None) or not placing.may_cut
    block_size = workers[0].block_size
    if not one_piece and placing.fits_pool(max_model_len, num_blocks, block_size, layout.chunk_tokens, fixed):
        return
    worker = min(workers, key=lambda worker: worker.num_blocks)
    block_bytes = block_size * layout.room_bytes_per_token
    tokens = max(0, worker.num_blocks - worker.state_blocks) * block_size
    if tokens >= max_model_len:
        return
    others = f", all {len(workers)} together too little for its ranges" if len(workers) > 1 and not one_piece else ""
    needed = (worker.state_blocks + -(-max_model_len // block_size)) * block_bytes
    memory = needed + layout.weight_bytes
    raise CapacityError(
        f"one sequence of max_model_len {max_model_len} tokens takes {needed / 2**30:.3g} GiB of KV cache, and an "
        f"R-worker has {worker.num_blocks * block_bytes / 2**30:.3g} GiB{others}: give at least --kv-cache-memory "
        f"{-(-memory // 2**20)}MiB, or at most --max-model-len {tokens}"
    )
