"""This process's rank, found in the launcher's environment variables, and each rank's settings."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.api.settings import split_address
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import KV_CACHE_SHARE, available_memory_bytes, usable_cores


@dataclass(frozen=True)
class RankPlace:
    """Rank ``index`` of ``size``, and number ``local_index`` of the ``local_size`` on its machine.

    ``host``, ``port``: where the ranks meet. ``has_store``: rank 0 must open that port itself.
    """

    index: int
    size: int
    local_index: int
    local_size: int
    host: str
    port: int
    has_store: bool

    @property
    def name(self) -> str:
        """The rank's name in log and error messages."""
        return f"rank {self.index} (process {os.getpid()} on {socket.gethostname()})"


def find_place(size: int, environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return this process's rank among ``size``, as a launcher such as torchrun has set it; None without a launcher.

    Without a launcher, the engine itself starts the other ranks. Raise ConfigError if the launcher started another
    number of processes than ``size``, or if rank 0's address is unknown.
    """
    # The name of Slurm's launcher, which starts the tasks of a job step
    srun = "srun of Slurm"
    # For each launcher, the variables that hold the rank, the number of ranks, the rank within the machine, and their
    # number
    starters = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "mpirun of Open MPI": (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        "mpirun of MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        srun: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    }
    for starter, names in starters.items():
        index, count, local_index, local_size = (environment.get(name, "") for name in names)
        if starter == srun:
            count = _tasks_of_step(environment)
        if not index.isdigit() or not count.isdigit() or int(count) == 1:
            continue
        if int(count) != size:
            raise ConfigError(f"tensor_parallel_size is {size}, and {starter} started {count} processes: give as many")
        host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ConfigError(
                f"tensor_parallel_size: ranks of {starter} meet at MASTER_ADDR and MASTER_PORT: set them to the "
                "host of rank 0 and a free port on it"
            )
        local = int(local_index) if local_index.isdigit() else 0
        own_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return RankPlace(
            int(index), size, local, int(local_size) if local_size.isdigit() else 1, host, int(port),
            own_store and index == "0",
        )  # fmt: skip
    return None


def _tasks_of_step(environment: Mapping[str, str]) -> str:
    """Return the number of tasks in this process's Slurm step; "1" in a batch script, which runs as one process.

    A batch script runs outside steps, where SLURM_NTASKS is the number of tasks of the whole job.
    """
    in_step = any(environment.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID"))
    if environment.get("SLURM_JOB_ID") and not in_step:
        return "1"
    return environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")


def settings_of(config: EngineConfig, index: int, size: int, num_here: int) -> EngineConfig:
    """Return the settings of rank ``index`` of ``size``; ``num_here`` ranks run on this machine.

    The addresses in ``r_workers`` are divided equally, in order. Rank 0 listens at the port of ``pool_listen``, rank 1
    at the next port, and so on. The R-workers of rank i park prefixes in the subfolder rank-i of ``park_dir``.
    """
    spec = config.r_worker_spec
    changes: dict[str, Any] = {}
    if spec.kind == "tcp":
        if len(spec.addresses) % size:
            raise ConfigError(
                f"r_workers: {len(spec.addresses)} R-workers cannot be dealt to {size} ranks: give a multiple of {size}"
            )
        each = len(spec.addresses) // size
        changes["r_workers"] = ",".join(spec.addresses[index * each : (index + 1) * each])
    if config.pool_listen is not None:
        host, port = split_address("pool_listen", config.pool_listen)
        changes["pool_listen"] = f"{host}:{port + index}"
    if config.park_dir is not None:
        changes["park_dir"] = str(Path(config.park_dir) / f"rank-{index}")
    if spec.on_this_machine and config.kv_cache_memory is None:
        num_bytes = int(available_memory_bytes() * KV_CACHE_SHARE) // (config.num_r_workers * num_here)
        changes["kv_cache_memory"] = num_bytes
    return replace(config, **changes)


def cores_of(config: EngineConfig, index: int, size: int) -> EngineConfig:
    """Return ``config`` with the cores of rank ``index`` of ``size`` ranks on this machine.

    The rank gets 1 / ``size`` of the S-worker's cores and of the R-workers' cores.
    """
    changes: dict[str, Any] = {}
    s_cores, r_cores = config.s_core_list or usable_cores(), config.r_core_list or usable_cores()
    changes["s_threads"] = config.s_threads or max(1, len(s_cores) // size)
    if len(s_cores) >= size:
        changes["s_cores"] = _share(s_cores, index, size)
    if config.r_worker_spec.on_this_machine and len(r_cores) >= size:
        changes["r_cores"] = _share(r_cores, index, size)
    return replace(config, **changes)


def _share(cores: list[int], index: int, size: int) -> str:
    first, end = index * len(cores) // size, (index + 1) * len(cores) // size
    return ",".join(map(str, cores[first:end]))
