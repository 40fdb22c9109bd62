"""The meaning of each cache id on the R-workers: the tokens of one sequence from one position on.
The journal records this, so that a later engine can use the caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from fastdecode.core.held import Named, Reached
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.sequence import TokenSequence


class Notes(NamedTuple):
    """Facts for the journal: the meaning of new cache ids, and how many cached tokens of each prompt are valid."""

    named: list[Named]
    reached: list[Reached]


NO_NOTES = Notes([], [])


class Names:
    """Records the meaning of cache ids when they are assigned, if ``is_wanted``.
    A segment that begins a sequence and has the sequence's own id is not recorded. ``counts_prompts``: also record how
    many cached tokens of each prompt are valid. This is needed if prompt rows attend on other R-workers than those that
    store them: if an attending R-worker is lost, the rows stored in that step are invalid.
    """

    def __init__(self, counts_prompts: bool) -> None:
        self.is_wanted, self._counts_prompts = False, counts_prompts
        self._named: list[Named] = []
        self._reached: dict[int, int] = {}

    def segments(self, sequence: TokenSequence, segments: Iterable[Segment]) -> None:
        for each in segments:
            if each.start or each.cache_id != sequence.sequence_id:
                self.name(each.cache_id, sequence.sequence_id, each.start)

    def name(self, cache_id: int, sequence_id: int, start: int) -> None:
        if self.is_wanted:
            self._named.append(Named(cache_id, sequence_id, start))

    def progress(self, prompts: Iterable[TokenSequence]) -> None:
        """Record how many cached tokens of each of ``prompts`` are valid."""
        if self.is_wanted and self._counts_prompts:
            self._reached |= {each.sequence_id: each.num_cached for each in prompts}

    def take(self) -> Notes:
        """Return the facts recorded since the last call."""
        notes = Notes(self._named, [Reached(*each) for each in self._reached.items()])
        self._named, self._reached = [], {}
        return notes


class CacheIds:
    """Yields new cache ids. They are negative, so that none equals a running sequence's id."""

    def __init__(self) -> None:
        self._ids = itertools.count(-1, -1)

    def new(self) -> int:
        return next(self._ids)

    def begin_below(self, lowest: int) -> None:
        """Make all later ids lower than ``lowest``, since higher ids are taken."""
        self._ids = itertools.count(min(0, lowest) - 1, -1)
