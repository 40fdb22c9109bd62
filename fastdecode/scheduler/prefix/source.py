"""The protocol of prefix sources, and what they find."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Prefix
from fastdecode.scheduler.sequence import TokenSequence


class Hit(NamedTuple):
    """A cached beginning: its full blocks, the prefix that has the last of them, its tokens, and who found it."""

    num_blocks: int
    prefix: Prefix
    num_tokens: int
    source: Source

    @property
    def is_own(self) -> bool:
        """True if the sequence itself left it: the sequence goes on in its blocks, also in those it does not share."""
        return self.source.is_own


class Source(Protocol):
    """Holds prefixes that sequences can begin from.

    The defaults are those of a source that has nothing to take at once, and keeps nothing.
    """

    is_own: bool = False

    def hits(self, sequence: TokenSequence) -> dict[int, Hit]:
        """Return for each R-worker the longest beginning of ``sequence`` that is worth taking, by its index."""
        return {}

    def pieces(self, sequence: TokenSequence, hit: Hit) -> list[Hit]:
        """Return what ``hit`` has of each segment of ``sequence``, in order."""
        return [hit]

    def twin(self, hit: Hit) -> Hit | None:
        """Return the same beginning on another R-worker, bit for bit, if there is one."""
        return None

    def take(self, segment: Segment, copy: Copy, hit: Hit) -> None:
        """Have ``copy`` of ``segment`` begin with what ``hit`` has on the same R-worker."""
        raise ValueError("this source has nothing to take")

    def close(self, sequence: TokenSequence) -> None:
        """Give up what is kept for ``sequence`` alone: it has begun, with that or without."""
        return

    def leave(self, sequence: TokenSequence) -> bool:
        """Keep what ``sequence``, which gives up its cache, leaves to others.

        Returns:
            True where its cache stays as it is, so that no R-worker releases it.
        """
        return False

    def forget(self, worker: int) -> None:
        """Forget what R-worker ``worker``, which is gone, had."""
        return


class Keeper(Source, Protocol):
    """The source that keeps what sequences of this engine compute.

    ``copies_all``: a sequence that begins from a hit needs room for a copy of the hit's state.
    """

    copies_all: bool

    def arrive(self, sequence: TokenSequence) -> None:
        """Note what ``sequence`` is about to compute."""

    def name(self, sequence: TokenSequence, hit: Hit | None) -> int:
        """Return the cache id of the only segment of ``sequence``, which begins from ``hit``; it may be a new one."""

    def rows_to_stop(self, sequence: TokenSequence, most: int) -> int:
        """Return how many rows of its prompt, at most ``most``, ``sequence`` computes before something is kept."""

    def keep(self, sequence: TokenSequence) -> None:
        """Keep what others can begin from: more of the prompt of ``sequence`` is cached, or all of it."""

    def will_keep(self, leader: TokenSequence, num_blocks: int) -> bool:
        """Return whether others can begin from the first ``num_blocks`` blocks that ``leader`` computes."""

    def is_worth(self, sequence: TokenSequence, num_blocks: int) -> bool:
        """Return whether ``sequence`` is better off with ``num_blocks`` cached blocks than with none."""
