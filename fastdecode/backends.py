"""Which attention backend a configuration asks for."""

from __future__ import annotations

from fastdecode.config import EngineConfig
from fastdecode.errors import ConfigError
from fastdecode.protocols import AttentionBackend
from fastdecode.resources import kv_cache_bytes


def make_backend(config: EngineConfig, cores: list[int]) -> AttentionBackend:
    """R-workers where ``config.r_workers`` says; those of this machine on ``cores``."""
    makers = {"inproc": _inproc, "tcp": _tcp}
    spec = config.r_worker_spec
    if spec.kind not in makers:
        raise ConfigError(f"r_workers: {config.r_workers!r} is not available in this version; use inproc:N")
    return makers[spec.kind](config, cores)


def _inproc(config: EngineConfig, cores: list[int]) -> AttentionBackend:
    """By default on all cores, in turn with the S-worker."""
    from fastdecode.cluster.inproc import InprocBackend, InprocSettings

    return InprocBackend(
        InprocSettings(
            num_workers=config.num_r_workers,
            kv_cache_bytes=kv_cache_bytes(config),
            block_size=config.block_size,
            num_threads=config.r_threads or max(1, len(cores) // config.num_r_workers),
            cores=tuple(cores),
            own_cores=config.separate_cores,
        )
    )


def _tcp(config: EngineConfig, cores: list[int]) -> AttentionBackend:
    from fastdecode.cluster.tcp import TcpBackend

    return TcpBackend(config.r_worker_spec.addresses, config.block_size, config.key_file)
