"""The S-worker and the R-workers of an MPI job: who is who, and how both end."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastdecode.cluster.host import Host
from fastdecode.cluster.mpi_path import OVER, MpiPath
from fastdecode.cluster.mpi_progress import Progress
from fastdecode.cluster.pool import PoolBackend
from fastdecode.cluster.remote import RemoteWorker
from fastdecode.cluster.session import Session
from fastdecode.errors import ConfigError

if TYPE_CHECKING:
    from fastdecode.cluster.mpi import MpiJob

S_RANK = 0
LEAVE_SECONDS = 10
"""How long an R-worker may take to answer that the job is over."""

RIGHT_LINE = (
    "mpirun -n 1 fastdecode bench throughput --r-workers mpi … : -n 4 fastdecode r-worker --transport mpi "
    "(`fastdecode launch --print` writes it for your hosts)"
)


class MpiBackend(PoolBackend):
    """``AttentionBackend`` over the other ranks of this job."""

    def __init__(self, block_size: int) -> None:
        job, progress = join_as_s_worker()
        super().__init__(
            [
                RemoteWorker(f"rank-{rank}", partial(MpiPath, job.peer(rank), progress), block_size)
                for rank in range(1, job.size)
            ]
        )


@functools.cache
def join_as_s_worker() -> tuple[MpiJob, Progress]:
    """Join this process's job as its S-worker, once; when this process ends, in whatever way, so do the R-workers.

    ConfigError where there is no MPI, or nobody to be the R-worker.
    """
    job = _join()
    if job.size == 1:
        raise ConfigError(
            f"r_workers: mpi: this process is alone, and R-workers must be in one job with it: {RIGHT_LINE}"
        )
    if job.rank != S_RANK:
        job.abort(f"two S-workers in one job, or not the first: {RIGHT_LINE}")
    progress = Progress()
    atexit.register(_leave, job, progress)
    return job, progress


def serve_job(host: Host, on_join: Callable[[int], None]) -> None:
    """Join this process's job as an R-worker and serve its S-worker until that says the job is over.

    ``on_join`` is called with the rank. ConfigError where this process is alone; a failure ends the job.
    """
    job = _join()
    if job.size == 1:
        raise ConfigError(
            f"transport mpi: this process is alone, and an S-worker must be in one job with it: {RIGHT_LINE}"
        )
    if job.rank == S_RANK:
        job.abort(f"the first rank is the S-worker's, and this is an R-worker: {RIGHT_LINE}")
    on_join(job.rank)
    try:
        _serve(job, host)
    except BaseException as error:
        job.abort(f"this R-worker failed: {type(error).__name__}: {error}")


def _serve(job: MpiJob, host: Host) -> None:
    peer, over = job.peer(S_RANK), False
    while not over:
        path = MpiPath(peer)
        Session(path, host).run()
        path.close()
        over = path.over
    peer.close()


def _leave(job: MpiJob, progress: Progress) -> None:
    """Tell the R-workers that the job is over and wait until each has heard; abort it if one does not."""
    progress.stop()
    peers = [job.peer(rank) for rank in range(1, job.size)]
    try:
        for peer in peers:
            peer.send_word(OVER)
        for peer in peers:
            if not peer.hears(OVER, LEAVE_SECONDS):
                job.abort(f"R-worker rank {peer.rank} did not end within {LEAVE_SECONDS} s")
            peer.close()
    except ConnectionError as error:
        job.abort(f"the job does not end: {error}")


def _join() -> MpiJob:
    try:
        from fastdecode.cluster.mpi import MpiJob
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"mpi needs mpi4py and an MPI library: pip install 'fastdecode[mpi]', or your cluster's MPI with "
            f"mpi4py ({reason})"
        ) from error
    return MpiJob()
