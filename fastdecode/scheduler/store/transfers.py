"""Copies of segments that are under way from one R-worker to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.holdings import Holdings
from fastdecode.scheduler.store.table import SequenceTable


@dataclass(eq=False)
class Transfer:
    """A copy of ``segment``, of ``sequence``, that is being made on R-worker ``target`` from the one on ``source``.

    The target's ``num_blocks`` blocks are taken since it was chosen. ``num_copied`` tokens are there; the next piece
    has ``num_tokens``. Once all are, R-worker ``drops`` gives its own copy up: a move, where that is the source; -1:
    none does.
    """

    sequence: Sequence
    segment: Segment
    source: int
    target: int
    num_blocks: int
    drops: int = -1
    num_copied: int = 0
    num_tokens: int = 0

    @property
    def cache_id(self) -> int:
        """The id by which both R-workers know the segment."""
        return self.segment.cache_id

    @property
    def is_move(self) -> bool:
        """True where the source's copy goes."""
        return self.drops == self.source


class TransfersUnderWay:
    """The part of the store that makes copies: its target has blocks for each from the moment it is chosen."""

    def __init__(self, workers: Workers, table: SequenceTable, holdings: Holdings) -> None:
        self._workers, self._table, self._holdings = workers, table, holdings
        self._all: list[Transfer] = []

    def __len__(self) -> int:
        """Return how many copies are under way."""
        return len(self._all)

    def __iter__(self) -> Iterator[Transfer]:
        """All of them, oldest first; some may be dropped meanwhile."""
        return iter(list(self._all))

    def begin_move(self, sequence: Sequence, segment: Segment, target: int, num_blocks: int) -> Transfer:
        """The home of ``segment`` is to be R-worker ``target``, with ``num_blocks`` blocks, more than the segment has
        where it is to grow there; where another R-worker has a copy, all copies keep as many as they have."""
        num_blocks = num_blocks if len(segment.copies) == 1 else segment.num_blocks
        return self._begin(Transfer(sequence, segment, segment.home, target, num_blocks, segment.home))

    def begin_copy(self, sequence: Sequence, segment: Segment, target: int, drops: int = -1) -> Transfer:
        """R-worker ``target`` is to have a copy of ``segment``; in the end R-worker ``drops``, one of two that have it,
        gives its own up, or none does."""
        if segment.home == drops:
            segment.copies.reverse()
            self._table.on_second[sequence.row] ^= segment is sequence.tail
            self._table.put(sequence)
        return self._begin(Transfer(sequence, segment, segment.home, target, segment.num_blocks, drops))

    def _begin(self, transfer: Transfer) -> Transfer:
        self._holdings.make_room(transfer.target, transfer.num_blocks)
        self._workers[transfer.target].take(transfer.num_blocks)
        self._all.append(transfer)
        return transfer

    def grow(self, transfer: Transfer, num_blocks: int) -> None:
        """The target takes ``num_blocks`` more, since the segment grew."""
        self._holdings.make_room(transfer.target, num_blocks)
        self._workers[transfer.target].grow(num_blocks)
        transfer.num_blocks += num_blocks

    def advance(self, transfer: Transfer) -> bool:
        """The next piece is there; True where all is, so that it is a copy like any other."""
        transfer.num_copied += transfer.num_tokens
        sequence, segment = transfer.sequence, transfer.segment
        if transfer.num_copied < segment.num_tokens:
            return False
        self._all.remove(transfer)
        place, on_second = len(segment.copies), self._table.on_second[sequence.row]
        if transfer.drops >= 0:
            place = segment.workers.index(transfer.drops)
            self._holdings.remove(sequence, segment, transfer.drops)
            self.redirect(segment, transfer.drops)
        segment.copies.insert(place, Copy(transfer.target))
        segment.num_blocks = transfer.num_blocks
        self._workers[transfer.target].num_sequences += segment is sequence.tail
        self._table.on_second[sequence.row] = on_second and (transfer.is_move or segment is not sequence.tail)
        self._table.put(sequence)
        return True

    def drop(self, transfer: Transfer) -> None:
        """Give up what was copied so far."""
        worker = self._workers[transfer.target]
        worker.give_back(transfer.num_blocks, ())
        if transfer.num_copied:
            worker.release(transfer.cache_id)
        self._all.remove(transfer)

    def drop_of(self, sequence: Sequence) -> None:
        """``sequence`` gives up its cache."""
        for transfer in self:
            if transfer.sequence is sequence:
                self.drop(transfer)

    def cut(self, segment: Segment, num_tokens: int) -> None:
        """What ``segment`` has beyond ``num_tokens`` tokens is wrong: a copy that has some of it is given up."""
        for transfer in self:
            if transfer.segment is segment and transfer.num_copied > num_tokens:
                self.drop(transfer)

    def redirect(self, segment: Segment, worker: int) -> None:
        """R-worker ``worker`` has no copy of ``segment`` any more: what is copied of it comes from another, if any."""
        for transfer in [each for each in self._all if each.segment is segment]:
            if not segment.copies:
                self.drop(transfer)
                continue
            transfer.source = segment.home
            transfer.drops = -1 if transfer.drops in (worker, segment.home) else transfer.drops
