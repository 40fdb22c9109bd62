"""Seconds of a step by its tokens, from steps that were timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class StepProfile:
    """``StepTime`` from measured steps: straight lines between them, the last one going on."""

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float]) -> None:
        """``tokens`` ascending, at least two; ``seconds`` of the steps that computed so many, without cached tokens."""
        self._tokens = np.array(tokens, np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))

    def __call__(self, tokens: int, kv_tokens: int) -> float:
        """See :class:`fastdecode.protocols.StepTime`; cached tokens are not counted."""
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
        beyond = max(0.0, tokens - self._tokens[-1]) * slope
        return float(np.interp(tokens, self._tokens, self._seconds) + beyond)
