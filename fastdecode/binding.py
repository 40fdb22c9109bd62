"""The cores that a launcher bound this process to, where that is a trap."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fastdecode.machine import usable_cores

MOST_RANKS = 2
"""Open MPI binds every rank of a job of at most so many to one core, and those of larger jobs to a NUMA node."""


def mend_binding(environment: Mapping[str, str] = os.environ) -> str:
    """Undo Open MPI's binding to a single core, where this machine gives more; what was done, "" where nothing was.

    Ranks of larger jobs, and those that a user bound to more than one core, are left as they are.
    """
    bound = os.sched_getaffinity(0)
    if len(bound) > 1 or not is_trapped(environment):
        return ""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel keeps to what the cgroup allows
    cores = usable_cores()
    if len(cores) == 1:
        os.sched_setaffinity(0, bound)
        return ""
    return (
        f"mpirun bound this process to core {min(bound)} alone, as Open MPI does with jobs of one or two ranks; it now "
        f"uses {len(cores)} cores (say which with --cores or --s-cores, or give mpirun --bind-to none)"
    )


def is_trapped(environment: Mapping[str, str]) -> bool:
    """True for a rank of a job so small that Open MPI binds it to one core."""
    size = environment.get("OMPI_COMM_WORLD_SIZE", "")
    return size.isdigit() and int(size) <= MOST_RANKS
