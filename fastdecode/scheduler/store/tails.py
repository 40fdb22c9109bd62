"""Tails: the segments to which sequences append, and how they advance, grow and are replaced."""

from __future__ import annotations

import numpy as np

from fastdecode.scheduler.names import CacheIds, Names
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.holdings import Holdings
from fastdecode.scheduler.store.table import SequenceTable


class Tails:
    """Counts the tokens and blocks that sequences append, and the sequences that append on each R-worker."""

    def __init__(self, workers: Workers, table: SequenceTable, holdings: Holdings, ids: CacheIds, names: Names) -> None:
        self._workers, self._table, self._holdings = workers, table, holdings
        self._ids, self._names = ids, names

    def advance(self, rows: np.ndarray) -> None:
        """Count the next token of each of the table rows ``rows`` as cached."""
        self._table.advance(rows)

    def advance_prompt(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Count ``num_tokens`` more prompt tokens of ``sequence`` as cached."""
        self._table.advance(sequence.row, num_tokens)
        self.go_on(sequence)

    def go_on(self, sequence: TokenSequence) -> None:
        """Make the next segment the tail of ``sequence``, if its tail is full."""
        while sequence.ahead and sequence.tail.num_tokens == self._table.segment_tokens:
            self.set_tail(sequence, sequence.num_closed + 1)

    def set_tail(self, sequence: TokenSequence, num_closed: int) -> None:
        """Make the segment after the first ``num_closed`` segments the tail of ``sequence``."""
        self.count(sequence, -1)
        sequence.num_closed = num_closed
        self._table.put(sequence)
        self.count(sequence, 1)

    def extend(self, sequence: TokenSequence, worker: int) -> None:
        """Give ``sequence``, whose tail is full, a new tail on R-worker ``worker``, without blocks yet."""
        segment = Segment(self._ids.new(), sequence.num_cached, workers=[worker])
        self._holdings.take(segment, segment.copies[0])
        sequence.segments.append(segment)
        self._names.segments(sequence, [segment])
        self.go_on(sequence)

    def grow(self, rows: np.ndarray, num_blocks: np.ndarray | int = 1) -> None:
        """Reserve ``num_blocks`` more blocks for the tail of each of the table ``rows``.
        A negative number frees blocks.
        """
        self._table.num_blocks[rows] += num_blocks
        for worker, count in enumerate(self._table.count_held(rows, num_blocks, len(self._workers)).tolist()):
            self._workers[worker].grow(count)

    def truncate(self, sequence: TokenSequence) -> None:
        """Queue a TRUNCATE of a decoding ``sequence``: R-workers hold more of its tokens than count as cached."""
        tail = sequence.tail
        for worker in tail.workers:
            self._workers[worker].truncate(tail.cache_id, tail.num_tokens)
        surplus = tail.num_blocks - self._workers.blocks_for(tail.num_tokens)
        self.grow(np.array([sequence.row]), -surplus)

    def fill_prompt(self, sequence: TokenSequence) -> None:
        """Count the whole prompt of ``sequence`` as cached, since prefill workers have stored it."""
        while sequence.in_prompt:
            end = sequence.tail.start + self._table.segment_tokens
            self._table.num_cached[sequence.row] = min(end, sequence.num_prefill)
            self.go_on(sequence)

    def count(self, sequence: TokenSequence, count: int) -> None:
        """Add ``count`` to the number of appending sequences of each R-worker that holds the tail of ``sequence``."""
        for worker in sequence.tail.workers:
            self._workers[worker].num_sequences += count
