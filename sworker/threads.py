"""torch's threads beside the R-workers' own."""

from __future__ import annotations

import os

SPIN_COUNT = "20000"
"""Turns that an idle OpenMP thread spins before it sleeps, some tens of microseconds.

libgomp's own default spins for milliseconds: on cores shared with an R-worker's threads, or with any other process,
matrix products then wait for each other's time slices (measured: 10 times slower beside one busy neighbour; with this
setting 3.4 times faster than that, and within a few per cent on a quiet machine). It is read when libgomp is loaded,
so it only counts when this module is imported before torch.
"""

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch  # noqa: E402


def set_threads(num_threads: int) -> None:
    """Threads torch uses within one operation."""
    torch.set_num_threads(num_threads)
