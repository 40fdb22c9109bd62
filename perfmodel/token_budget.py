"""Sarathi-Serve's token budget (section 4.3): the most tokens a step may compute and still be in time."""

from __future__ import annotations

from fastdecode.errors import ConfigError, PlanError
from fastdecode.protocols import StepTime

TILE_TOKENS = 128
"""Rows that a GPU's matrix products are tiled by, a power of two; a chunk of 257 cost 32 % more than one of 256."""


def token_budget(
    step_time: StepTime,
    target_seconds: float,
    kv_tokens: int = 0,
    tile_tokens: int = TILE_TOKENS,
    most_tokens: int = 1 << 20,
) -> int:
    """τ: the largest multiple of ``tile_tokens`` whose step takes at most ``target_seconds``, the time between tokens.

    ``kv_tokens``: cached tokens attended in that step. ``step_time`` must not fall with more tokens. PlanError says by
    how much one tile is too slow.
    """
    if tile_tokens < 1 or most_tokens < tile_tokens:
        raise ConfigError(f"a tile of {tile_tokens} tokens and at most {most_tokens} leave no budget")
    least = step_time(tile_tokens, kv_tokens)
    if least > target_seconds:
        raise PlanError(
            f"a step of one tile ({tile_tokens} tokens) takes {least:.3g} s, {least - target_seconds:.3g} s more than "
            f"the target of {target_seconds:.3g} s between tokens"
        )
    low, high = 1, most_tokens // tile_tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        if step_time(middle * tile_tokens, kv_tokens) <= target_seconds:
            low = middle
        else:
            high = middle
    return low * tile_tokens
