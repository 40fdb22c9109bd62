"""Sets up vLLM's process groups: of this process alone, or of the S-worker's tensor-parallel ranks.

vLLM's layers then load the weights of their rank. They sum and gather by the S-worker's ranks, which use shared memory
on one machine and notice a lost rank.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fastdecode.core.errors import ConfigError


class RankCommunicator:
    """Sums and gathers the tensors of vLLM's layers over the ranks of ``rank``, in place of vLLM's communicator."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors."""
        total: torch.Tensor = self._rank.sum(tensor)
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return all ranks' tensors, joined along ``dim``."""
        return torch.cat(self._rank.gather(tensor.contiguous()), dim)

    def destroy(self) -> None:
        """Do nothing: the job's ranks end their groups themselves. vLLM calls this function."""


def begin_groups(rank: Any, has_experts: bool) -> None:
    """Set up vLLM's process groups: of this process if ``rank`` is None, else of all ranks.

    Groups for a dense model include none for experts, so the first model with experts sets them up again.
    Raise ConfigError if this process is a rank of a job, and ``rank`` is None.
    """
    from vllm.distributed import parallel_state as groups

    in_job = dist.is_initialized() and dist.get_world_size() > 1
    if in_job and not rank:
        raise ConfigError("speculative_config: a draft model runs beside ranks without --model-impl vllm only")
    if rank or (groups.model_parallel_is_initialized() and groups.get_tp_group().world_size > 1):
        for name in [name for name, value in vars(groups).items() if isinstance(value, groups.GroupCoordinator)]:
            setattr(groups, name, None)  # of an earlier job, whose processes have left it
    if groups.model_parallel_is_initialized():
        if groups._EP is not None or not has_experts:
            return
        groups.destroy_model_parallel()
    index, size = (rank.index, rank.size) if rank else (0, 1)
    with _own_ident():
        groups.init_distributed_environment(size, index, f"file://{tempfile.mkdtemp()}/store", index, "gloo")
        groups.initialize_model_parallel(size)
    if rank:
        groups.get_tp_group().device_communicator = RankCommunicator(rank)


@contextlib.contextmanager
def _own_ident() -> Iterator[None]:
    """Give this process its own VLLM_DIST_IDENT, so that vLLM's CPU communicator makes no shared memory.

    Ranks of one parent may inherit one name, and vLLM then shares memory by that name. The memory outlives killed
    ranks, and the next ranks of that parent cannot start.
    """
    name = "VLLM_DIST_IDENT"
    before = os.environ.get(name)
    os.environ[name] = uuid.uuid4().hex
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
