"""torch's threads beside the R-workers' own."""

from __future__ import annotations

import torch


def set_threads(num_threads: int) -> None:
    """Threads torch uses within one operation."""
    torch.set_num_threads(num_threads)
