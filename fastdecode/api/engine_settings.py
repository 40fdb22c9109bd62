"""Derives values from the engine's settings: parsed worker specs, memory in bytes, and core lists."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.api.engine_fields import EngineFields
from fastdecode.api.settings import (
    ON_R_WORKERS,
    WorkerSpec,
    parse_bytes,
    parse_cores,
    parse_kv_cache_memory,
    parse_lora_modules,
    parse_park,
    parse_prefill_workers,
    parse_r_workers,
)
from fastdecode.core.machine import usable_cores
from fastdecode.core.parked import ParkPlace
from fastdecode.core.placing import AskedPlacing
from fastdecode.drafting.speculative_config import SpeculativeConfig


@dataclass(frozen=True)
class EngineSettings(EngineFields):
    """Parses the fields of ``EngineFields``, such as worker addresses and memory sizes."""

    def bytes_of(self, name: str) -> int | None:
        """Return the memory setting ``name`` in bytes; None if the engine chooses the size."""
        value = getattr(self, name)
        if value is None:
            return None
        return parse_kv_cache_memory(value) if name == "kv_cache_memory" else parse_bytes(name, value)

    @property
    def journal_folder(self) -> str | None:
        """The folder of the journal; None if the journal is elsewhere or off."""
        return None if self.journal == ON_R_WORKERS else self.journal

    @property
    def r_worker_spec(self) -> WorkerSpec:
        """The setting ``r_workers``, parsed."""
        return parse_r_workers(self.r_workers)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The setting ``speculative_config``, parsed; None if it is not set."""
        return SpeculativeConfig.of(self.speculative_config)

    @property
    def lora(self) -> tuple[str, str] | None:
        """Name and folder of the adapter in ``lora_modules``. Raise ConfigError for more than one."""
        return parse_lora_modules(self.lora_modules)

    @property
    def state_dtype(self) -> str:
        """The dtype of recurrent states, from ``mamba_ssm_cache_dtype``."""
        return "float32" if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype

    @property
    def placing(self) -> AskedPlacing:
        """The placing of KV caches on R-workers by these settings: range length and number of copies."""
        return AskedPlacing.of(self)

    @property
    def prefill_worker_spec(self) -> WorkerSpec | None:
        """The setting ``prefill_workers``, parsed; None without prefill workers."""
        return None if self.prefill_workers is None else parse_prefill_workers(self.prefill_workers)

    @property
    def park(self) -> ParkPlace | None:
        """The folder and limits for parked prefixes on R-workers that this process starts; None without parking."""
        return parse_park(self.park_dir, self.park_after, self.park_bytes)

    @property
    def in_mpi_job(self) -> bool:
        """True if R-workers or prefill workers are ranks of this process's job."""
        prefill = self.prefill_worker_spec
        return self.r_worker_spec.kind == "mpi" or (prefill is not None and prefill.kind == "mpi")

    @property
    def prefill_thread_count(self) -> int:
        """Number of threads of each prefill worker that this process starts; by default an equal share of the cores."""
        cores, spec = self.prefill_core_list or usable_cores(), self.prefill_worker_spec
        return self.prefill_threads or max(1, len(cores) // (spec.count if spec else 1))

    @property
    def prefill_core_list(self) -> list[int] | None:
        """Core numbers to which spawned prefill workers are pinned; None if they are not pinned."""
        return parse_cores("prefill_cores", self.prefill_cores)

    @property
    def num_r_workers(self) -> int:
        """The number of R-workers that ``r_workers`` asks for."""
        return self.r_worker_spec.count

    @property
    def s_core_list(self) -> list[int] | None:
        """Core numbers of the S-worker; None: not pinned. By default, the cores that spawned R-workers do not use."""
        given = parse_cores("s_cores", self.s_cores)
        if given is None and self.r_worker_spec.kind == "spawn" and self.r_core_list:
            return sorted(set(usable_cores()) - set(self.r_core_list)) or None
        return given

    @property
    def s_thread_count(self) -> int:
        """Number of threads for the S-worker's matrix products; by default one per core."""
        return self.s_threads or len(self.s_core_list or usable_cores())

    @property
    def r_core_list(self) -> list[int] | None:
        """Core numbers to which the R-workers are pinned; None if they are not pinned."""
        return parse_cores("r_cores", self.r_cores)

    @property
    def separate_cores(self) -> bool:
        """True if S-worker and R-workers have separate cores, so that they can work at the same time."""
        return bool(self.s_core_list and self.r_core_list and not set(self.s_core_list) & set(self.r_core_list))
