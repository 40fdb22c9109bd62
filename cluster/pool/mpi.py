"""The S-worker's side of R-workers that are ranks of an MPI job."""

from __future__ import annotations

from functools import partial

from fastdecode.cluster.links.mpi_job import (
    Role,
    join_as_s_worker,
)
from fastdecode.cluster.links.mpi_link import MpiLink
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.remote import RemoteWorker


class MpiBackend(PoolBackend):
    """An ``AttentionBackend`` over the R-workers among the other ranks of this MPI job."""

    def __init__(self, block_size: int) -> None:
        rank = join_as_s_worker()
        super().__init__(
            [
                RemoteWorker(f"rank-{each}", partial(MpiLink, rank.job.peer(each), rank.progress), block_size)
                for each in rank.of(Role.R_WORKER)
            ]
        )
