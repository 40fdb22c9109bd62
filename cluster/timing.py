"""What a step report's moments say about the way to an R-worker and back."""

from __future__ import annotations

import numpy as np


def transfer_seconds(submitted: np.ndarray, busy_start: np.ndarray, busy_end: np.ndarray) -> float:
    """Σ (busy start − the later of submit and the worker's previous call's end), in seconds.

    All arrays are float64 [num_mini_batches, num_layers] on one clock, and 0 where nothing ran. A worker serves its
    calls one after another, so a call waits for the one before it, which is not transfer.
    """
    ran = busy_end > 0
    order = np.argsort(busy_start[ran])
    starts, ends, asked = busy_start[ran][order], busy_end[ran][order], submitted[ran][order]
    could_start = np.maximum(asked, np.concatenate([[0.0], ends[:-1]]))
    return float(np.maximum(starts - could_start, 0.0).sum())
