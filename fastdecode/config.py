"""Every engine setting, frozen, and validated once when it is made."""

from __future__ import annotations

import ctypes
import re
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdecode.addresses import RWorkerSpec, check_key, check_security, parse_r_workers, split_address
from fastdecode.errors import ConfigError
from fastdecode.machine import total_memory_bytes, usable_cores
from fastdecode.types import ISAS

DEMO_MODEL = Path(__file__).parent / "demo_model"
"""The byte-level model that ships with the package."""

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULES = ("sls", "stall-free", "fcfs", "request-level", "hybrid", "prefill-first")
BLOCK_SIZES = (16, 32, 64, 128, 256)

MAX_THREADS = 1024
MAX_SEATS = 1 << 20
"""Threads of one worker; more is a slip of the finger."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class EngineConfig:
    """One field per engine flag, with underscores; None means "choose for me". ConfigError names a bad field."""

    model: str = str(DEMO_MODEL)
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    enforce_eager: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 256
    num_mini_batches: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | str | None = None
    enable_prefix_caching: bool = True
    schedule: str = "sls"
    kv_load_limit: int | None = None
    micro_batch_interval: int | None = None
    tbt_target: float | None = None
    prefill_scratch: int | str | None = None
    r_workers: str = "inproc"
    r_threads: int | None = None
    s_threads: int | None = None
    s_cores: str | None = None
    r_cores: str | None = None
    pool_listen: str | None = None
    key_file: str | None = None
    profile: str | None = None
    security: str | None = None
    uniform_arithmetic: str = "auto"
    seed: int = 0
    trace: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        self._check_device()
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("uniform_arithmetic", self.uniform_arithmetic, ("auto", *ISAS))
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))} tokens, not {self.block_size!r}"
            )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_mini_batches",
            "kv_load_limit",
            "micro_batch_interval",
            "r_threads",
            "s_threads",
        ):
            _at_least_one(name, getattr(self, name))
        if self.tbt_target is not None and not self.tbt_target > 0:
            raise ConfigError(f"tbt_target must be above 0 seconds, not {self.tbt_target!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token in every step"
            )
        if self.max_num_seqs > MAX_SEATS:
            raise ConfigError(f"max_num_seqs must be at most {MAX_SEATS}, not {self.max_num_seqs}")
        for name in ("r_threads", "s_threads"):
            if (getattr(self, name) or 1) > MAX_THREADS:
                raise ConfigError(f"{name} must be at most {MAX_THREADS}, not {getattr(self, name)}")
        self._check_r_workers()
        self._check_memory()
        self._check_cores()

    def _check_device(self) -> None:
        _one_of("device", self.device, DEVICES)
        if self.device == "cuda" and not _has_gpu_driver():
            raise ConfigError("device: 'cuda' needs a GPU, and this machine has no driver for one; use 'auto' or 'cpu'")

    def _check_r_workers(self) -> None:
        """R-workers elsewhere have settings of their own, and are reached over a network only with a key."""
        spec = self.r_worker_spec
        check_key("r_workers", [split_address("r_workers", each)[0] for each in spec.addresses], self.key_file)
        for name in ("kv_cache_memory", "r_threads", "r_cores"):
            if not spec.on_this_machine and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}: R-workers that this process does not start have their own; "
                    f"give it to `fastdecode r-worker`"
                )
        check_security(self.security, self.key_file)
        if self.pool_listen is not None:
            check_key("pool_listen", [split_address("pool_listen", self.pool_listen, 0)[0]], self.key_file)
            if spec.kind == "mpi":
                raise ConfigError("pool_listen: an MPI job has the ranks it was started with; use host:port or spawn:N")
        elif spec.kind != "tcp" and self.key_file:
            raise ConfigError(f"key_file is for R-workers at host:port, and r_workers is {self.r_workers}")

    def _check_memory(self) -> None:
        for name, times in (("kv_cache_memory", self.num_r_workers), ("prefill_scratch", 1)):
            wanted = self.bytes_of(name)
            if wanted is not None and wanted * times > total_memory_bytes():
                each = f" for each of {times} R-workers" if times > 1 else ""
                raise ConfigError(
                    f"{name}: {getattr(self, name)}{each} is more than this machine's "
                    f"{total_memory_bytes() / 2**30:.1f} GiB"
                )

    def _check_cores(self) -> None:
        for name, cores in (("s_cores", self.s_core_list), ("r_cores", self.r_core_list)):
            missing = sorted(set(cores or ()) - set(usable_cores()))
            if missing:
                raise ConfigError(
                    f"{name}: {getattr(self, name)!r} names cores that this process may not use "
                    f"({reprlib.repr(missing)}); it has {usable_cores()}"
                )

    def bytes_of(self, name: str) -> int | None:
        """A memory setting in bytes, None where it is to be chosen."""
        value = getattr(self, name)
        return None if value is None else parse_bytes(name, value)

    @property
    def r_worker_spec(self) -> RWorkerSpec:
        """What ``r_workers`` asks for."""
        return parse_r_workers(self.r_workers)

    @property
    def num_r_workers(self) -> int:
        """R-workers that ``r_workers`` asks for."""
        return self.r_worker_spec.count

    @property
    def s_core_list(self) -> list[int] | None:
        """Cores of the S-worker, None when not pinned: by default what spawned R-workers with cores leave, if any."""
        given = parse_cores("s_cores", self.s_cores)
        if given is None and self.r_worker_spec.kind == "spawn" and self.r_core_list:
            return sorted(set(usable_cores()) - set(self.r_core_list)) or None
        return given

    @property
    def r_core_list(self) -> list[int] | None:
        """Cores of the R-workers, None when not pinned."""
        return parse_cores("r_cores", self.r_cores)

    @property
    def separate_cores(self) -> bool:
        """True when S and R were given cores of their own, so that they can work at the same time."""
        return bool(self.s_core_list and self.r_core_list and not set(self.s_core_list) & set(self.r_core_list))


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from 4294967296, "4GiB", "512MB" or "1.5G"; ConfigError names the setting."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", str(value), re.IGNORECASE)
    unit = (match.group(2) or "").upper() if match else ""
    size = int(float(match.group(1)) * (_BINARY_UNITS[unit + "i"] if match.group(3) else _UNITS[unit])) if match else 0
    if size < 1:
        raise ConfigError(f"{name} must be a positive number of bytes such as 4GiB or 512MB, not {value!r}")
    return size


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _has_gpu_driver() -> bool:
    """Whether torch, which this floor does not import, could find a GPU at all: NVIDIA's driver, or AMD's."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def parse_cores(name: str, spec: str | None) -> list[int] | None:
    """Core numbers from "0,2-3"; ConfigError names the setting."""
    if spec is None:
        return None
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", spec):
        raise ConfigError(f"{name} must be a list of cores such as 0,2-3, not {spec!r}")
    ranges = [part.split("-") for part in spec.split(",")]
    cores = sorted({core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)})
    if not cores:
        raise ConfigError(f"{name}: {spec!r} names no core; ranges go upwards, such as 0-3")
    return cores
