"""Which attention backend a configuration asks for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastdecode.config import EngineConfig
from fastdecode.protocols import AttentionBackend
from fastdecode.resources import kv_cache_bytes

if TYPE_CHECKING:
    from fastdecode.cluster.pool import PoolBackend
    from fastdecode.cluster.tuning import Tuning

logger = logging.getLogger(__name__)


def make_backend(config: EngineConfig, cores: list[int]) -> AttentionBackend:
    """R-workers where ``config.r_workers`` says, those of this machine on ``cores``; and more, where they may join."""
    pool = _make_pool(config, cores)
    if config.pool_listen:
        from fastdecode.cluster.tcp import make_lobby

        lobby = make_lobby(config.pool_listen, config.block_size, config.key_file, config.security)
        logger.info("R-workers may join at %s", lobby.address)
        pool.extend_from(lobby)
    return pool


def tuning() -> Tuning:
    """What R-workers of this machine attend with; see :func:`fastdecode.cluster.tuning.tuning`."""
    from fastdecode.cluster import tuning as measured

    return measured.tuning()


def _make_pool(config: EngineConfig, cores: list[int]) -> PoolBackend:
    spec = config.r_worker_spec
    if spec.kind == "tcp":
        from fastdecode.cluster.tcp import TcpBackend

        return TcpBackend(spec.addresses, config.block_size, config.key_file, config.security)

    if spec.kind == "mpi":
        from fastdecode.cluster.mpi_backend import MpiBackend

        return MpiBackend(config.block_size)

    from fastdecode.cluster.inproc import InprocBackend, InprocSettings
    from fastdecode.cluster.spawn import SpawnBackend

    settings = InprocSettings(
        num_workers=spec.count,
        kv_cache_bytes=kv_cache_bytes(config),
        block_size=config.block_size,
        num_threads=config.r_threads or max(1, len(cores) // spec.count),
        cores=tuple(cores),
        own_cores=config.separate_cores,
    )
    if spec.kind == "spawn":
        return SpawnBackend([settings.size(index) for index in range(spec.count)], config.block_size)
    return InprocBackend(settings)


def join_job() -> None:
    """Take this process's place in its MPI job.

    To be called before a model is loaded: the R-workers should not wait for it, and end with this process if it fails.
    ConfigError where there is nobody to join.
    """
    from fastdecode.cluster.mpi_backend import join_as_s_worker

    join_as_s_worker()
