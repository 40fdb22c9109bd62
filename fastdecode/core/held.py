"""Descriptions of the sequences that R-workers hold, from which a later engine continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class HeldSequence:
    """A sequence of ``num_tokens`` cached tokens, which an R-worker holds as ``cache_id``.
    ``blocks``: the R-worker's numbers of its blocks; sequences that share a block have the same number. ``least``:
    fewest tokens that a sequence with a recurrent state can be cut to; above ``num_tokens`` if the state is invalid.
    """

    cache_id: int
    num_tokens: int
    blocks: tuple[int, ...]
    least: int = 0

    @property
    def is_spoilt(self) -> bool:
        """True if the sequence is useless, since an unfinished step has overwritten its recurrent state."""
        return self.least > self.num_tokens


class Named(NamedTuple):
    """The tokens of a sequence from ``start`` on are cached as ``cache_id``, an id never used for other tokens."""

    cache_id: int
    sequence_id: int
    start: int


class Reached(NamedTuple):
    """Says that the first ``num_tokens`` tokens of a sequence, which is computing its prompt, are cached."""

    sequence_id: int
    num_tokens: int


class KnownTokens(NamedTuple):
    """A sequence's token ids, beginning with its first token.
    R-workers may have cached the tokens from ``start`` on.
    """

    sequence_id: int
    start: int
    token_ids: list[int]
