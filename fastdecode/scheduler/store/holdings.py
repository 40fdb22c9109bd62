"""Copies of segments: those that R-workers hold, which come, are forked, are cut and go, and those under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.cache import PrefixCache
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.table import SequenceTable


class Holdings:
    """Counts the blocks of each copy, and tells its R-worker what becomes of it."""

    def __init__(self, workers: Workers, prefixes: PrefixCache, table: SequenceTable) -> None:
        self._workers, self._prefixes, self._table = workers, prefixes, table

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Evict prefixes until ``num_blocks`` are free on R-worker ``worker``; False if that is not enough."""
        return self._prefixes.make_room(worker, num_blocks)

    def take(self, segment: Segment, copy: Copy) -> None:
        """``copy`` of ``segment`` is on its R-worker now, which counts its blocks."""
        num_own = segment.num_blocks - len(copy.shared)
        self._prefixes.make_room(copy.worker, num_own)
        self._workers[copy.worker].take(num_own)

    def give_up(self, segment: Segment, copy: Copy, is_known: bool, stays: bool = False) -> None:
        """The blocks of ``copy`` are free again; its R-worker is told where something of it is there, or where the
        R-worker knows of it (``is_known``), unless it ``stays`` as a prefix."""
        worker = self._workers[copy.worker]
        worker.give_back(segment.num_blocks - len(copy.shared), copy.shared)
        if (segment.num_tokens > 0 or is_known) and not stays:
            worker.release(segment.cache_id)

    def remove(self, sequence: TokenSequence, segment: Segment, worker: int) -> None:
        """R-worker ``worker`` gives up its copy of ``segment``, of ``sequence``."""
        copy = segment.on(worker)
        if copy is None:
            raise KeyError(f"R-worker {worker} has no copy of {segment.cache_id}")
        self.give_up(segment, copy, is_known=sequence.job_id > 0)
        segment.copies.remove(copy)
        if segment is sequence.tail:
            self._workers[worker].num_sequences -= 1
            self._table.on_second[sequence.row] = False
        self._table.put(sequence)

    def fork(self, source: Segment, cache_id: int) -> Segment:
        """Return a segment of the same tokens in the same places: full blocks are shared, and for a partial one there
        is room already, as there is for a state."""
        num_full, rest = divmod(source.num_tokens, self._workers.block_size)
        segment = Segment(cache_id, source.start, num_full + self._workers.sizes.blocks_of_copy(rest))
        segment.num_tokens = source.num_tokens
        for copy in source.copies:
            worker, shared = self._workers[copy.worker], copy.share(num_full)
            worker.hold(shared)
            worker.num_segments += 1
            worker.fork(cache_id, source.cache_id, source.num_tokens)
            segment.copies.append(Copy(copy.worker, shared))
        return segment

    def cut(self, segment: Segment, num_tokens: int, num_blocks: int) -> bool:
        """What ``segment`` has beyond ``num_tokens`` tokens is wrong: it is forgotten, and ``num_blocks`` are kept.

        Blocks that were shared have to be replaced by own ones: where these are not to be had only the full blocks of
        what is right are kept, and False is returned.
        """
        num_full = num_tokens // self._workers.block_size
        has_room = self.make_room_to_cut(segment, num_tokens, num_blocks)
        if not has_room:
            num_tokens, num_blocks = num_full * self._workers.block_size, num_full
        for copy in segment.copies:
            worker = self._workers[copy.worker]
            wrong = copy.shared[num_full:]
            del copy.shared[num_full:]
            worker.drop(wrong)
            worker.grow(num_blocks + len(wrong) - segment.num_blocks)
            worker.truncate(segment.cache_id, num_tokens)
        segment.num_tokens, segment.num_blocks = num_tokens, num_blocks
        return has_room

    def make_room_to_cut(self, segment: Segment, num_tokens: int, num_blocks: int) -> bool:
        """Forget what was kept beyond ``num_tokens`` tokens, and evict for own blocks in place of shared ones; False
        where :meth:`cut` would not leave these tokens."""
        num_full = num_tokens // self._workers.block_size
        for copy in segment.copies:
            self._prefixes.forget_beyond(copy, num_tokens)
        return all(
            self._make_room_to_replace(copy, num_full, num_blocks - segment.num_blocks) for copy in segment.copies
        )

    def _make_room_to_replace(self, copy: Copy, num_full: int, more: int) -> bool:
        """Evict until the R-worker of ``copy`` can replace all but ``num_full`` shared blocks, and give ``more``."""
        wrong = copy.shared[num_full:]
        freed = sum(block.num_sequences == 1 and block.num_prefixes == 0 for block in wrong)
        return self._prefixes.make_room(copy.worker, len(wrong) - freed + more)


@dataclass(eq=False)
class Transfer:
    """A copy of ``segment``, of ``sequence``, that is being made on R-worker ``target`` from the one on ``source``.

    The target's ``num_blocks`` blocks are taken since it was chosen. ``num_copied`` tokens are there; the next piece
    has ``num_tokens``. Once all are, R-worker ``drops`` gives its own copy up: a move, where that is the source; -1:
    none does.
    """

    sequence: TokenSequence
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
        """True if the source's copy goes."""
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
        """Yield all of them, oldest first; some may be dropped meanwhile."""
        return iter(list(self._all))

    def begin_move(self, sequence: TokenSequence, segment: Segment, target: int, num_blocks: int) -> Transfer:
        """The home of ``segment`` is to be R-worker ``target``, with ``num_blocks`` blocks, more than the segment has
        where it is to grow there; where another R-worker has a copy, all copies keep as many as they have."""
        num_blocks = num_blocks if len(segment.copies) == 1 else segment.num_blocks
        return self._begin(Transfer(sequence, segment, segment.home, target, num_blocks, segment.home))

    def begin_copy(self, sequence: TokenSequence, segment: Segment, target: int, drops: int = -1) -> Transfer:
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
        """Return the next piece is there; True if all is, so that it is a copy like any other."""
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

    def drop_of(self, sequence: TokenSequence) -> None:
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
