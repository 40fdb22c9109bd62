"""How many tokens are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class BalancedDrafts:
    """Placeholder until the balance is there: always drafts the most."""

    def __init__(self, most_drafts: int, num_mini_batches: int, step_time: Any = None) -> None:
        pass

    def acceptance(self, tried: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return np.ones(len(tried))

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        return most

    def observe(
        self,
        num_tokens: int,
        num_sequences: int,
        kv_loads: Sequence[int],
        s_seconds: float,
        wait_seconds: float,
        r_seconds: Sequence[float],
    ) -> None:
        pass

    def observe_drafting(self, num_sequences: int, num_passes: int, seconds: float) -> None:
        pass
