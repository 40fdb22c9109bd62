"""What an R-worker holds, by its own account, for an S-worker that comes after the one which left it there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldSequence:
    """``cache_id`` has ``num_tokens`` tokens in ``blocks``, which are numbers of the R-worker: sequences that share a
    block name the same one."""

    cache_id: int
    num_tokens: int
    blocks: tuple[int, ...]
