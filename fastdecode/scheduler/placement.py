"""Which R-worker a new sequence goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

CROWDED = 1.25
"""A worker with a sequence's prefix is passed over when its load is above this many times the mean."""


def workers_by_preference(
    kv_loads: np.ndarray, bandwidths: Sequence[float], available: np.ndarray, hit_blocks: Mapping[int, int]
) -> list[int]:
    """Workers, best first: the one that holds most of the prefix unless it is crowded, then the least loaded.

    ``kv_loads``: float64 [num_workers], cached tokens; ``available``: int64 [num_workers], blocks. A load counts in
    proportion to the worker's bandwidth. Among equals the one with most blocks available comes first.
    """
    relative = kv_loads / np.asarray(bandwidths)
    order = np.lexsort((-available, relative)).tolist()
    if hit_blocks:
        home = max(hit_blocks, key=lambda worker: (hit_blocks[worker], -relative[worker]))
        if relative[home] <= CROWDED * relative.mean():
            order.remove(home)
            order.insert(0, home)
    return order
