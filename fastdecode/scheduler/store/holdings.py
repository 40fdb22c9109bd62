"""Copies of segments on R-workers, finished or not: how they are made, forked, cut and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.cache import PrefixCache
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.table import SequenceTable


class Holdings:
    """Counts the blocks of each copy, and queues controls for the R-workers."""

    def __init__(self, workers: Workers, prefixes: PrefixCache, table: SequenceTable) -> None:
        self._workers, self._prefixes, self._table = workers, prefixes, table

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Evict prefixes until ``num_blocks`` blocks are free on R-worker ``worker``.
        Return False if that is impossible.
        """
        return self._prefixes.make_room(worker, num_blocks)

    def take(self, segment: Segment, copy: Copy) -> None:
        """Count the blocks of ``copy``, a new copy of ``segment``, as used on its R-worker."""
        num_own = segment.num_blocks - len(copy.shared)
        self._prefixes.make_room(copy.worker, num_own)
        self._workers[copy.worker].take(num_own)

    def give_up(self, segment: Segment, copy: Copy, is_known: bool, stays: bool = False) -> None:
        """Free the blocks of ``copy`` of ``segment``, and queue its release on the R-worker.
        No release is needed if the copy ``stays`` as a prefix, or if it has no tokens and the R-worker does not know it
        (``is_known``).
        """
        worker = self._workers[copy.worker]
        worker.give_back(segment.num_blocks - len(copy.shared), copy.shared)
        if (segment.num_tokens > 0 or is_known) and not stays:
            worker.release(segment.cache_id)

    def remove(self, sequence: TokenSequence, segment: Segment, worker: int) -> None:
        """Drop the copy of ``segment`` of ``sequence`` on R-worker ``worker``."""
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
        """Return a fork of ``source`` named ``cache_id``, with the same tokens on the same R-workers.
        Full blocks are shared. Blocks for copies of a partly full block and of a state are already reserved.
        """
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
        """Drop the tokens of ``segment`` after the first ``num_tokens``, which are wrong; keep ``num_blocks`` blocks.
        Shared blocks with wrong tokens are replaced by unshared ones. If no blocks are free for these, only full blocks
        of correct tokens are kept, and the result is False.
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
        """Prepare :meth:`cut`: forget prefixes beyond ``num_tokens`` tokens, and evict others for unshared blocks.
        Return False if :meth:`cut` could not keep ``num_tokens`` tokens.
        """
        num_full = num_tokens // self._workers.block_size
        for copy in segment.copies:
            self._prefixes.forget_beyond(copy, num_tokens)
        return all(
            self._make_room_to_replace(copy, num_full, num_blocks - segment.num_blocks) for copy in segment.copies
        )

    def _make_room_to_replace(self, copy: Copy, num_full: int, more: int) -> bool:
        """Evict prefixes for ``more`` blocks, and for replacing shared blocks of ``copy``; return False if impossible.
        The first ``num_full`` blocks stay shared.
        """
        wrong = copy.shared[num_full:]
        freed = sum(block.num_sequences == 1 and block.num_prefixes == 0 for block in wrong)
        return self._prefixes.make_room(copy.worker, len(wrong) - freed + more)


@dataclass(eq=False)
class Transfer:
    """An unfinished copy of ``segment`` of ``sequence``, from R-worker ``source`` to R-worker ``target``.
    The target's ``num_blocks`` blocks are reserved from the start. ``num_copied`` tokens have arrived; the next piece
    has ``num_tokens``. At the end, R-worker ``drops`` drops its copy; -1 for none. If this is the source, the transfer
    is a move.
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
        """The cache id of the segment on both R-workers."""
        return self.segment.cache_id

    @property
    def is_move(self) -> bool:
        """True if the source R-worker drops its copy at the end."""
        return self.drops == self.source


class TransfersUnderWay:
    """The unfinished copies. When a target R-worker is chosen, its blocks are reserved at once."""

    def __init__(self, workers: Workers, table: SequenceTable, holdings: Holdings) -> None:
        self._workers, self._table, self._holdings = workers, table, holdings
        self._all: list[Transfer] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Transfer]:
        """Yield all transfers, oldest first; the caller may drop some meanwhile."""
        return iter(list(self._all))

    def begin_move(self, sequence: TokenSequence, segment: Segment, target: int, num_blocks: int) -> Transfer:
        """Begin to move the first copy of ``segment`` to R-worker ``target``, with ``num_blocks`` blocks.
        These may be more blocks than the segment has, so that it can grow there. If another R-worker has a copy, all
        copies keep their number of blocks.
        """
        num_blocks = num_blocks if len(segment.copies) == 1 else segment.num_blocks
        return self._begin(Transfer(sequence, segment, segment.home, target, num_blocks, segment.home))

    def begin_copy(self, sequence: TokenSequence, segment: Segment, target: int, drops: int = -1) -> Transfer:
        """Begin to copy ``segment`` to R-worker ``target``.

        At the end R-worker ``drops``, which has one of two copies, drops it; -1 for none.
        """
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
        """Reserve ``num_blocks`` more blocks on the target R-worker of ``transfer``, since the segment grew."""
        self._holdings.make_room(transfer.target, num_blocks)
        self._workers[transfer.target].grow(num_blocks)
        transfer.num_blocks += num_blocks

    def advance(self, transfer: Transfer) -> bool:
        """Count the next piece as copied.
        If the copy is then complete, add it to the segment's copies and return True.
        """
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
        """Drop the tokens that ``transfer`` has copied, free its blocks on the target R-worker, and end it."""
        worker = self._workers[transfer.target]
        worker.give_back(transfer.num_blocks, ())
        if transfer.num_copied:
            worker.release(transfer.cache_id)
        self._all.remove(transfer)

    def drop_of(self, sequence: TokenSequence) -> None:
        """Drop all transfers of ``sequence``, which gives up its cache."""
        for transfer in self:
            if transfer.sequence is sequence:
                self.drop(transfer)

    def cut(self, segment: Segment, num_tokens: int) -> None:
        """Drop transfers of ``segment`` that have copied more than its first ``num_tokens`` tokens; these are wrong."""
        for transfer in self:
            if transfer.segment is segment and transfer.num_copied > num_tokens:
                self.drop(transfer)

    def redirect(self, segment: Segment, worker: int) -> None:
        """Continue transfers of ``segment`` from another copy, since R-worker ``worker`` no longer has one."""
        for transfer in [each for each in self._all if each.segment is segment]:
            if not segment.copies:
                self.drop(transfer)
                continue
            transfer.source = segment.home
            transfer.drops = -1 if transfer.drops in (worker, segment.home) else transfer.drops
