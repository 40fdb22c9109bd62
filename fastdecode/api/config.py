"""The engine's configuration: frozen, and validated when the object is made."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from pathlib import Path

from fastdecode.api.engine_fields import MODEL, MOST_SECONDS, QUANTIZATIONS
from fastdecode.api.engine_settings import EngineSettings
from fastdecode.api.settings import check_settings
from fastdecode.api.worker_checks import check_workers
from fastdecode.core.errors import ConfigError


@dataclass(frozen=True)
class EngineConfig(EngineSettings):
    """One field per engine flag, with underscores; None means "choose for me". A ConfigError names a bad field."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.device == "cuda" and not _has_gpu_driver():
            raise ConfigError("device: 'cuda' needs a GPU, and this machine has no driver for one; use 'auto' or 'cpu'")
        _check_quantization(self)
        if self.tbt_target is not None and not self.tbt_target > 0:
            raise ConfigError(f"tbt_target must be above 0 seconds, not {self.tbt_target!r}")
        for name, least in (("silence_seconds", 0.2), ("wait_for_r_workers", 0.0), ("keep_session", 0.0)):
            if not least <= getattr(self, name) <= MOST_SECONDS:
                raise ConfigError(f"{name} must be {least:g} to {MOST_SECONDS} seconds, not {getattr(self, name)!r}")
        if not 0 <= self.audit <= 1:
            raise ConfigError(f"audit must be 0 to 1, the share of rows to audit, such as 0.01, not {self.audit!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token in every step"
            )
        if self.profile is not None and not Path(self.profile).is_file():
            raise ConfigError(f"profile: there is no file {self.profile!r}; `fastdecode calibrate` writes one")
        _ = self.speculative, self.lora, self.park
        self.placing.check()
        check_workers(self)


def _check_quantization(config: EngineConfig) -> None:
    """Raise ConfigError for a quantization that is unknown or that the model's device does not support."""
    if config.int8_calibration_tokens and (config.quantization != "int8" or config.device == "cuda"):
        raise ConfigError("int8_calibration_tokens: only quantization int8 on a CPU is calibrated: leave it out")
    if config.quantization is None:
        return
    if config.quantization not in QUANTIZATIONS:
        raise ConfigError(
            "quantization: packed checkpoints and GGUF say themselves how they are packed, so leave it out; for others "
            f"give one of {', '.join(QUANTIZATIONS)}, not {config.quantization!r}"
        )
    if config.device == "cpu" and config.quantization == "int4":
        raise ConfigError("quantization: int4 is torchao's, for a GPU: give device cuda, or int8 for this CPU")


def flag_names(group: str) -> list[str]:
    """Return the names of the ``EngineConfig`` fields whose flags are in help group ``group``."""
    return [each.name for each in fields(EngineConfig) if each.metadata.get("group") == group]


def prefill_settings() -> list[str]:
    """Return the names of the settings that prefill workers share with the engine."""
    return [*flag_names(MODEL), "seed"]


def _has_gpu_driver() -> bool:
    """Return whether this machine has a GPU driver of NVIDIA or AMD. This package must not import torch to ask."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True
