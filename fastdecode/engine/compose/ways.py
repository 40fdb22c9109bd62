"""Checks that refuse settings which a model's layers do not support."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.kinds import Way
from fastdecode.kinds.layout import KVLayout

Asks = Callable[[EngineConfig, bool], bool]
"""A test whether settings use a feature; its second argument says whether the model is on a GPU."""


def _is_given(name: str, config: EngineConfig, on_gpu: bool) -> bool:
    return getattr(config, name) not in ("auto", None)


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
