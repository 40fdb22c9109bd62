"""Descriptions of the sequences that R-workers cache, for an engine that continues an earlier one's requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class HeldSequence:
    """A sequence of ``num_tokens`` cached tokens, which an R-worker caches as ``cache_id``.
    ``blocks``: the R-worker's numbers of the sequence's blocks; sequences that share a block have its number in common.
    ``least``: fewest tokens to which a sequence with a recurrent state can be cut; above ``num_tokens`` if its state is
    invalid.
    """

    cache_id: int
    num_tokens: int
    blocks: tuple[int, ...]
    least: int = 0

    @property
    def is_spoilt(self) -> bool:
        """True if the cached sequence is useless: an unfinished step has overwritten its recurrent state."""
        return self.least > self.num_tokens


class Named(NamedTuple):
    """Says that a sequence's tokens from ``start`` on are cached as ``cache_id``, an id never used for other tokens."""

    cache_id: int
    sequence_id: int
    start: int


class Reached(NamedTuple):
    """Says that R-workers have cached the first ``num_tokens`` tokens of a sequence that is computing its prompt."""

    sequence_id: int
    num_tokens: int


class KnownTokens(NamedTuple):
    """The token ids of a sequence, from its first token on. R-workers may have cached those from ``start`` on."""

    sequence_id: int
    start: int
    token_ids: list[int]
