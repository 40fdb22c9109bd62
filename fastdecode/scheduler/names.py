"""What only an engine knows of the sequences of its R-workers: of which texts they are. For the engine after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from fastdecode.core.held import Named, Reached
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.sequence import TokenSequence


class Notes(NamedTuple):
    """What is new of both kinds."""

    named: list[Named]
    reached: list[Reached]


NO_NOTES = Notes([], [])


class Names:
    """Notes names as they are given, where that ``is_wanted``; what has a sequence's own name from its first token on
    needs none.

    ``counts_prompts``: rows of a prompt may attend on other R-workers than those that hold them, so if one of these is
    lost they are wrong there until the next step. Hence it is noted how much of each prompt is right.
    """

    def __init__(self, counts_prompts: bool) -> None:
        self.is_wanted, self._counts_prompts = False, counts_prompts
        self._named: list[Named] = []
        self._reached: dict[int, int] = {}

    def segments(self, sequence: TokenSequence, segments: Iterable[Segment]) -> None:
        """``segments`` of ``sequence`` have their names."""
        for each in segments:
            if each.start or each.cache_id != sequence.sequence_id:
                self.name(each.cache_id, sequence.sequence_id, each.start)

    def name(self, cache_id: int, sequence_id: int, start: int) -> None:
        """``cache_id`` is of the tokens of a sequence from ``start`` on."""
        if self.is_wanted:
            self._named.append(Named(cache_id, sequence_id, start))

    def progress(self, prompts: Iterable[TokenSequence]) -> None:
        """So much of ``prompts`` is cached, and right."""
        if self.is_wanted and self._counts_prompts:
            self._reached |= {each.sequence_id: each.num_cached for each in prompts}

    def take(self) -> Notes:
        """Return what is new since this was called last."""
        notes = Notes(self._named, [Reached(*each) for each in self._reached.items()])
        self._named, self._reached = [], {}
        return notes


class CacheIds:
    """New names for what R-workers hold: negative, so that none is a running sequence's id."""

    def __init__(self) -> None:
        self._ids = itertools.count(-1, -1)

    def new(self) -> int:
        """Return a name that was not given before."""
        return next(self._ids)

    def begin_below(self, lowest: int) -> None:
        """Give names below ``lowest`` from here on: the others are taken."""
        self._ids = itertools.count(min(0, lowest) - 1, -1)
