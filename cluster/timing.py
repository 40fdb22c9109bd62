"""What a step report's moments say about the way to an R-worker and back."""

from __future__ import annotations

import numpy as np


def transfer_seconds(
    submitted: np.ndarray, busy_start: np.ndarray, busy_end: np.ndarray, arrived: np.ndarray | None = None
) -> float:
    """Σ (busy start − the later of submit and the worker's previous call's end), plus the ways back, in seconds.

    All arrays are float64 [num_mini_batches, num_layers] on one clock, and 0 where nothing ran. A worker serves its
    calls one after another, so a call waits for the one before it, which is not transfer. ``arrived`` is when o came,
    where the S-worker was waiting for it and so knows, else 0: a way back that nobody waited for is not counted.
    """
    ran = busy_end > 0
    order = np.argsort(busy_start[ran])
    starts, ends, asked = busy_start[ran][order], busy_end[ran][order], submitted[ran][order]
    could_start = np.maximum(asked, np.concatenate([[0.0], ends[:-1]]))
    there = float(np.maximum(starts - could_start, 0.0).sum())
    if arrived is None:
        return there
    seen = ran & (arrived > 0)
    return there + float(np.maximum(arrived[seen] - busy_end[seen], 0.0).sum())
