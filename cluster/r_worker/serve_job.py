"""Serves the first rank of an MPI job, the S-worker."""

from __future__ import annotations

from collections.abc import Callable

from fastdecode.cluster.links.mpi_job import S_RANK, join_as_r_worker
from fastdecode.cluster.links.mpi_link import MpiLink
from fastdecode.cluster.r_worker.host import Host
from fastdecode.cluster.r_worker.session import Session
from fastdecode.cluster.wire.handshake import Security


def serve_job(host: Host, on_join: Callable[[int], None], security: Security) -> None:
    """Join this process's job as an R-worker and serve its S-worker until the job is over.

    ``on_join`` is called with the rank. ``security``: of the KV port. Raise ConfigError if this process is alone. A
    failure ends the job.
    """
    job = join_as_r_worker().job
    on_join(job.rank)
    try:
        peer, over = job.peer(S_RANK), False
        while not over:
            link = MpiLink(peer)
            Session(link, host, security=security).run()
            link.close()
            over = link.over
        peer.close()
    except BaseException as error:
        job.abort(f"this R-worker failed: {type(error).__name__}: {error}")
