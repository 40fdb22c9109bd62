"""The interface of sources of cached prefixes, and ``Hit``, which says what a source found."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Prefix
from fastdecode.scheduler.sequence import TokenSequence


class Hit(NamedTuple):
    """A cached prefix from which a sequence can start: ``num_tokens`` tokens, found by ``source``.
    ``num_blocks``: its full blocks. ``prefix``: the retained prefix with the last of them.
    """

    num_blocks: int
    prefix: Prefix
    num_tokens: int
    source: Source

    @property
    def is_own(self) -> bool:
        """True if an earlier engine left this sequence itself: the sequence then continues in the prefix's blocks."""
        return self.source.is_own


class Source(Protocol):
    """Has prefixes from which sequences can start.

    The defaults are those of a source that has no prefixes and keeps none.
    """

    is_own: bool = False

    def hits(self, sequence: TokenSequence) -> dict[int, Hit]:
        """Return, by R-worker, the longest prefix of ``sequence`` that can be reused."""
        return {}

    def pieces(self, sequence: TokenSequence, hit: Hit) -> list[Hit]:
        """Return the part of the prefix ``hit`` that is in each segment of ``sequence``, in order."""
        return [hit]

    def twin(self, hit: Hit) -> Hit | None:
        """Return the second copy of the prefix ``hit``, on another R-worker; None if there is none."""
        return None

    def take(self, segment: Segment, copy: Copy, hit: Hit) -> None:
        """Let ``copy`` of ``segment`` begin with the tokens of the prefix ``hit``, which are on the same R-worker."""
        raise ValueError("this source has no blocks to take")

    def close(self, sequence: TokenSequence) -> None:
        """Release the prefixes that are kept only for ``sequence``, which no longer needs them."""
        return

    def leave(self, sequence: TokenSequence) -> bool:
        """Retain cached tokens of ``sequence``, which gives up its cache, for other sequences.

        Returns:
          True if the whole cache is retained as it is, so that no R-worker needs to release it.
        """
        return False

    def forget(self, worker: int) -> None:
        """Forget all prefixes of the lost R-worker ``worker``."""
        return


class Keeper(Source, Protocol):
    """The source that retains the prefixes that this engine's sequences compute.
    ``copies_all``: starting from a hit copies its recurrent state, for which blocks must be free.
    """

    copies_all: bool

    def arrive(self, sequence: TokenSequence) -> None:
        """Prepare for the prefixes that ``sequence``, which was just queued, will compute."""

    def name(self, sequence: TokenSequence, hit: Hit | None) -> int:
        """Return the cache id, old or new, of the single segment of ``sequence``, which starts from ``hit``."""

    def rows_to_stop(self, sequence: TokenSequence, most: int) -> int:
        """Return how many prompt rows, at most ``most``, ``sequence`` computes before it stops to retain a prefix."""

    def keep(self, sequence: TokenSequence) -> None:
        """Retain a prefix for other sequences, now that more of the prompt of ``sequence`` is cached."""

    def make_place(self, count: int) -> bool:
        """Release prefixes until ``count`` more may be retained; return False if ``count`` is above the limit."""
        return True

    def will_keep(self, leader: TokenSequence, num_blocks: int) -> bool:
        """Return whether other sequences can start from the first ``num_blocks`` blocks that ``leader`` computes."""

    def is_worth(self, sequence: TokenSequence, num_blocks: int) -> bool:
        """Return whether ``sequence`` should start from ``num_blocks`` cached blocks, not recompute them."""
