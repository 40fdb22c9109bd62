"""An R-worker's account of the sequences that it holds, for a later S-worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class HeldSequence:
    """A sequence ``cache_id`` of ``num_tokens`` tokens in ``blocks``, numbered by the R-worker.

    Sequences that share a block name the same one. ``least``: fewest tokens that a sequence with a state can be cut to;
    above ``num_tokens`` if the state is spoilt.
    """

    cache_id: int
    num_tokens: int
    blocks: tuple[int, ...]
    least: int = 0

    @property
    def is_spoilt(self) -> bool:
        """True if it is useless, since an unfinished step has written its state."""
        return self.least > self.num_tokens


class Named(NamedTuple):
    """R-workers know the tokens of a sequence from ``start`` on as ``cache_id``, which stands for no other tokens."""

    cache_id: int
    sequence_id: int
    start: int


class Reached(NamedTuple):
    """The first ``num_tokens`` tokens of a sequence in its prompt, or in its recomputation, are cached."""

    sequence_id: int
    num_tokens: int


class KnownTokens(NamedTuple):
    """Tokens of a sequence from its first on. R-workers may have cached those from ``start`` on."""

    sequence_id: int
    start: int
    token_ids: list[int]
