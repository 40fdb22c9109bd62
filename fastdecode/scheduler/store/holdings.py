"""Copies of segments that R-workers hold: they come, are forked, are cut, and go."""

from __future__ import annotations

from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.cache import PrefixCache
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.table import SequenceTable


class Holdings:
    """Counts the blocks of each copy, and tells its R-worker what becomes of it."""

    def __init__(self, workers: Workers, prefixes: PrefixCache, table: SequenceTable) -> None:
        self._workers, self._prefixes, self._table = workers, prefixes, table

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Evict prefixes until ``num_blocks`` are free on R-worker ``worker``; False where that is not enough."""
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

    def remove(self, sequence: Sequence, segment: Segment, worker: int) -> None:
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
        has_room = self.has_room_to_cut(segment, num_tokens, num_blocks)
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

    def has_room_to_cut(self, segment: Segment, num_tokens: int, num_blocks: int) -> bool:
        """Whether :meth:`cut` would leave ``num_tokens`` tokens; what was kept of those beyond is forgotten."""
        num_full = num_tokens // self._workers.block_size
        for copy in segment.copies:
            self._prefixes.forget_beyond(copy, num_tokens)
        return all(self._replaces(copy, num_full, num_blocks - segment.num_blocks) for copy in segment.copies)

    def _replaces(self, copy: Copy, num_full: int, more: int) -> bool:
        """Whether the R-worker of ``copy`` can replace all but ``num_full`` shared blocks, and give ``more``."""
        wrong = copy.shared[num_full:]
        freed = sum(block.num_sequences == 1 and block.num_prefixes == 0 for block in wrong)
        return self._prefixes.make_room(copy.worker, len(wrong) - freed + more)
