"""Seconds of a step by its tokens, and the token budget that keeps a target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdecode.errors import ConfigError
from fastdecode.protocols import StepTime

TILE = 64
"""Token budgets are rounded down to multiples of this, where matrix products are at their best: in Sarathi-Serve
(section 4.3) a chunk of 257 tokens cost 32 % more than one of 256."""


class StepProfile:
    """``StepTime`` from measured steps: straight lines between them, the last one going on."""

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float], seconds_per_kv_token: float = 0.0) -> None:
        """``tokens`` ascending, at least two; ``seconds`` of the steps that computed so many, without cached tokens."""
        self._tokens = np.array(tokens, np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))
        self._seconds_per_kv_token = seconds_per_kv_token

    def __call__(self, tokens: int, kv_tokens: int) -> float:
        """See :class:`fastdecode.protocols.StepTime`."""
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
        beyond = max(0.0, tokens - self._tokens[-1]) * slope
        return float(np.interp(tokens, self._tokens, self._seconds) + beyond + kv_tokens * self._seconds_per_kv_token)


def token_budget(step_time: StepTime, target_seconds: float, least: int, most: int) -> int:
    """The most tokens, ``least`` … ``most``, of a step that meets ``target_seconds``: Sarathi-Serve's τ.

    A multiple of TILE unless that is below ``least``. ConfigError when not even ``least`` tokens do.
    """
    if step_time(least, 0) > target_seconds:
        raise ConfigError(
            f"tbt_target: a step of {least} tokens, one for each of max_num_seqs, takes {step_time(least, 0):.3g} s: "
            f"give at least that instead of {target_seconds:.3g} s, or lower max_num_seqs"
        )
    tiles = [tokens for tokens in range(TILE, most + 1, TILE) if step_time(tokens, 0) <= target_seconds]
    return max([least, *tiles])
