"""Checks that the settings of workers are consistent: where workers run, how they connect, what they may use."""

from __future__ import annotations

import reprlib

from fastdecode.api.engine_settings import EngineSettings
from fastdecode.api.settings import MAX_SESSION, ON_R_WORKERS, check_key, check_security, parse_cores, split_address
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import total_memory_bytes, usable_cores


def check_workers(config: EngineSettings) -> None:
    """Raise ConfigError for an invalid or conflicting setting of R-workers, prefill workers or ranks."""
    _check_r_workers(config)
    _check_parking(config)
    _check_prefill_workers(config)
    _check_memory(config)
    _check_cores(config)
    _check_session(config)
    if config.tensor_parallel_size > 1:
        _check_tensor_parallel(config)


def _check_tensor_parallel(config: EngineSettings) -> None:
    """Raise ConfigError for settings that do not work with several S-worker processes (tensor parallelism)."""
    size = config.tensor_parallel_size
    if config.in_mpi_job:
        name = "r_workers" if config.r_worker_spec.kind == "mpi" else "prefill_workers"
        raise ConfigError(
            f"{name}: an MPI job's ranks serve one S-worker, its rank 0, and tensor_parallel_size {size} makes "
            f"{size}: give {name} as host:port or spawn:N"
        )
    if config.profile is not None:
        raise ConfigError(f"profile is not for tensor_parallel_size {size}: leave one of them out")


def _check_r_workers(config: EngineSettings) -> None:
    """Raise ConfigError if settings give local resources to remote R-workers, or lack a key file for them."""
    spec = config.r_worker_spec
    check_key("r_workers", [split_address("r_workers", each)[0] for each in spec.addresses], config.key_file)
    for name in ("kv_cache_memory", "r_threads", "r_cores", "park_dir"):
        placed = spec.kind == "ray" and name in ("kv_cache_memory", "r_threads")
        if not spec.on_this_machine and not placed and getattr(config, name) is not None:
            raise ConfigError(
                f"{name}: this process does not start these R-workers; give {name} to `fastdecode r-worker`"
            )
    if spec.kind == "join":
        _check_joining(config)
    if spec.kind == "ray":
        _check_ray(config)
    else:
        check_security(config.security, config.key_file)
    if config.pool_listen is not None:
        check_key("pool_listen", [split_address("pool_listen", config.pool_listen, 0)[0]], config.key_file)
        if spec.kind == "mpi":
            raise ConfigError("pool_listen: an MPI job has the ranks it was started with; use host:port or spawn:N")
    elif spec.kind not in ("tcp", "ray") and config.key_file and config.prefill_workers is None:
        raise ConfigError(f"key_file is for R-workers at host:port, and r_workers is {config.r_workers}")


def _check_parking(config: EngineSettings) -> None:
    """Raise ConfigError for parking without prefix caching."""
    if config.park_dir is not None and not config.enable_prefix_caching:
        raise ConfigError("park_dir needs prefix caching: leave out enable_prefix_caching=False, or leave out park_dir")


def _check_joining(config: EngineSettings) -> None:
    """Raise ConfigError for settings that conflict with R-workers that join later."""
    if config.pool_listen is None:
        raise ConfigError(
            f"r_workers: {config.r_workers} are R-workers that join: give --pool-listen HOST:PORT as well"
        )
    if config.profile is not None:
        raise ConfigError("profile: a profile names R-workers by address: give --r-workers host:port,host:port")


def _check_ray(config: EngineSettings) -> None:
    """Raise ConfigError for settings that conflict with R-workers placed by Ray."""
    if config.profile is not None:
        raise ConfigError("profile: a profile names R-workers by address, and Ray places them elsewhere in each job")
    spec = config.prefill_worker_spec
    makes_one_key = config.tensor_parallel_size == 1 and spec is not None and spec.kind == "spawn"
    if spec is not None and not makes_one_key and config.key_file is None:
        raise ConfigError(
            f"prefill_workers: {config.prefill_workers} and the R-workers that Ray places for each rank need the "
            f"same --key-file: give one"
        )


def _check_prefill_workers(config: EngineSettings) -> None:
    """Raise ConfigError if settings give local cores to remote prefill workers, or lack a key file for them."""
    spec = config.prefill_worker_spec
    for name in ("prefill_threads", "prefill_cores"):
        if getattr(config, name) is not None and (spec is None or spec.kind != "spawn"):
            raise ConfigError(f"{name} is for --prefill-workers spawn:N; others have their own")
    if spec is None:
        return
    hosts = [split_address("prefill_workers", each)[0] for each in spec.addresses]
    check_key("prefill_workers", hosts, config.key_file)


def _check_session(config: EngineSettings) -> None:
    """Raise ConfigError if a setting for sessions, standbys or journals lacks another setting that it needs."""
    if config.session is not None and not (0 < len(config.session) <= MAX_SESSION and config.session.isprintable()):
        raise ConfigError(f"session must be a name of at most {MAX_SESSION} characters, not {config.session!r:.80}")
    if config.session is not None and config.r_worker_spec.kind != "tcp":
        raise ConfigError(f"session: R-workers at host:port outlive an S-worker, and r_workers is {config.r_workers}")
    for name in ("session", "journal") if config.stands_by else ():
        if getattr(config, name) is None:
            raise ConfigError(f"standby: a standby continues the session that --{name} names: give one")
    if config.journal == ON_R_WORKERS:
        _check_journal_on_r_workers(config)
    if not config.keep_session:
        return
    for name, missing in (("session", config.session is None), ("journal", config.journal is None)):
        if missing:
            raise ConfigError(f"keep_session: R-workers keep sequences of the session that --{name} names: give one")
    if not config.enable_prefix_caching:
        raise ConfigError("keep_session needs enable_prefix_caching")


def _check_journal_on_r_workers(config: EngineSettings) -> None:
    """Raise ConfigError for settings that conflict with a journal in the R-workers' memory."""
    if not config.keep_session:
        raise ConfigError(
            f"journal: {ON_R_WORKERS} keep it as long as the session's sequences: give --session and --keep-session, "
            f"or a folder"
        )
    if config.tensor_parallel_size > 1:
        what = f"tensor_parallel_size {config.tensor_parallel_size}"
        raise ConfigError(f"journal: {ON_R_WORKERS} keep no journal with {what}: give a folder")


def _check_memory(config: EngineSettings) -> None:
    for name, times in (("kv_cache_memory", config.num_r_workers), ("prefill_scratch", 1), ("state_memory", 1)):
        wanted = config.bytes_of(name)
        if name == "kv_cache_memory" and config.r_worker_spec.kind == "ray":
            continue  # Ray itself checks the memory of its nodes
        if wanted is not None and wanted * times > total_memory_bytes():
            each = f" for each of {times} R-workers" if times > 1 else ""
            raise ConfigError(
                f"{name}: {getattr(config, name)}{each} is more than this machine's "
                f"{total_memory_bytes() / 2**30:.1f} GiB"
            )


def _check_cores(config: EngineSettings) -> None:
    for name in ("s_cores", "r_cores", "prefill_cores"):
        cores = config.s_core_list if name == "s_cores" else parse_cores(name, getattr(config, name))
        missing = sorted(set(cores or ()) - set(usable_cores()))
        if missing:
            raise ConfigError(
                f"{name}: {getattr(config, name)!r} names cores that this process may not use "
                f"({reprlib.repr(missing)}); it has {usable_cores()}"
            )
