"""What an R-worker holds, by its own account, for an S-worker that comes after the one which left it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class HeldSequence:
    """``cache_id`` has ``num_tokens`` tokens in ``blocks``, which are numbers of the R-worker: sequences that share a
    block name the same one. ``least``: fewest tokens that it can be cut to, where it has a state; more than it has
    where that is spoilt."""

    cache_id: int
    num_tokens: int
    blocks: tuple[int, ...]
    least: int = 0

    @property
    def is_spoilt(self) -> bool:
        """True if it is of no use: its state was written by a step that was not ended."""
        return self.least > self.num_tokens


class Named(NamedTuple):
    """R-workers know tokens of a sequence, from ``start`` on, as ``cache_id``; no other tokens get that name."""

    cache_id: int
    sequence_id: int
    start: int


class Reached(NamedTuple):
    """Of a sequence whose prompt is computed, or all of it again, ``num_tokens`` are cached."""

    sequence_id: int
    num_tokens: int


class KnownTokens(NamedTuple):
    """Tokens of a sequence from its first one on, of which R-workers may have cached those from ``start`` on."""

    sequence_id: int
    start: int
    token_ids: list[int]
