"""Jobs of a parker: one sequence on its way to the disk, or back into the cache."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.r_worker.parking.chain_file import ChainReader, ChainWriter, Head
from fastdecode.core.errors import CapacityError, ChainError
from fastdecode.core.parked import PIECE_TOKENS

FAILURES = (OSError, ChainError, CapacityError, MemoryError, ValueError, KeyError)


class _Job:
    """Work that the disk's thread does piece by piece. ``num_tokens``: tokens that are done."""

    def __init__(self, worker: _rworker.RWorker, threads: ThreadPoolExecutor, sequence_id: int) -> None:
        self.num_tokens = 0
        self._worker, self._threads, self._sequence_id = worker, threads, sequence_id
        self._pending: deque[Future[Any]] = deque()

    def _come(self, deadline: float) -> Any:
        """Wait for the disk's thread; return its next result. Raise TimeoutError at ``deadline``."""
        value = self._pending[0].result(max(0.0, deadline - time.monotonic()))
        self._pending.popleft()
        return value

    def _settle(self) -> None:
        """Wait until the disk's thread has finished the current piece."""
        for each in self._pending:
            with suppress(*FAILURES):
                each.result()


class ParkJob(_Job):
    """A sequence being written to the disk."""

    def __init__(
        self, worker: _rworker.RWorker, threads: ThreadPoolExecutor, sequence_id: int, head: Head, writer: ChainWriter
    ) -> None:
        super().__init__(worker, threads, sequence_id)
        self._head, self._writer, self._next = head, writer, 0
        self._is_written = False

    def advance(self, deadline: float) -> bool:
        """Continue until ``deadline``; return True once the file is in place."""
        try:
            while True:
                if self._pending:
                    self._come(deadline)
                if self._is_written:
                    return True
                self._begin_next()
        except NotYet:
            return False

    def _begin_next(self) -> None:
        number = self._next
        if number == self._head.num_pieces:
            self._pending.append(self._threads.submit(self._writer.finish))
            self._is_written = True
            return
        if number == self._head.num_block_pieces:
            piece, self.num_tokens = self._end(), self._head.num_tokens
        else:
            count = self._head.piece_tokens(number)
            piece = self._worker.export_blocks(self._sequence_id, number * PIECE_TOKENS, count)
            self.num_tokens = number * PIECE_TOKENS + count
        self._pending.append(self._threads.submit(self._writer.append, piece))
        self._next = number + 1

    def _end(self) -> np.ndarray:
        """Return the tokens after the last block, and the states after all tokens, uint8 [end_bytes]."""
        length = self._worker.sequence_length(self._sequence_id)
        if length != self._head.num_tokens:
            raise ValueError(f"park: sequence {self._sequence_id} has {length} tokens, not {self._head.num_tokens}")
        end = self._worker.export(self._sequence_id, length - self._head.rest, self._head.rest)
        if end.nbytes != self._head.end_bytes:
            raise ValueError(f"park: sequence {self._sequence_id} has no state after its {length} tokens")
        return end

    def close(self) -> None:
        """Remove an incomplete file."""
        self._settle()
        self._writer.discard()


class WakeJob(_Job):
    """A sequence being loaded: ``num_wanted`` tokens in blocks, and the chain's end if layers are recurrent."""

    def __init__(
        self,
        worker: _rworker.RWorker,
        threads: ThreadPoolExecutor,
        sequence_id: int,
        num_wanted: int,
        reader: ChainReader,
    ) -> None:
        super().__init__(worker, threads, sequence_id)
        self._num_wanted, self._reader = num_wanted, reader
        has_blocks = reader.head.block_bytes > 0
        self._num_pieces, self._next = -(-num_wanted // PIECE_TOKENS) if has_blocks else 0, 0
        # Bytes of pieces read into the cache between two checks of the deadline
        at_once_bytes = 1 << 23
        self._most = max(worker.num_threads, at_once_bytes // reader.head.piece_bytes(0))
        self._num_fetched = 0
        self._end: Future[np.ndarray] | None = None

    def advance(self, deadline: float) -> bool:
        """Continue until ``deadline``; return True once all tokens are in the cache."""
        try:
            while True:
                if self._next < self._num_pieces:
                    self._take(self._num_cached() or self._fetch(deadline))
                if self._next == self._num_pieces:
                    return not self._reader.head.end_bytes or self._take_end(deadline)
                if time.monotonic() > deadline:
                    return False
        except NotYet:
            return False

    def _take(self, count: int) -> None:
        """Read the next ``count`` pieces into the cache, and check their checksums."""
        numbers = range(self._next, self._next + count)
        counts = [min(PIECE_TOKENS, self._num_wanted - number * PIECE_TOKENS) for number in numbers]
        places = [(tokens, *self._reader.place(number)) for number, tokens in zip(numbers, counts, strict=True)]
        try:
            found = self._worker.read_blocks(self._sequence_id, self.num_tokens, self._reader.fileno(), places)
        finally:
            self.num_tokens = self._length()
        for number, checksum in zip(numbers, found, strict=True):
            self._reader.check(number, checksum)
        self._next += count

    def _take_end(self, deadline: float) -> bool:
        """Add the tokens after the last block and the states to the sequence; return True, since that completes it."""
        self._end = self._end or self._threads.submit(self._reader.end)
        head, data = self._reader.head, self._end.result(max(0.0, deadline - time.monotonic()))
        start = head.num_tokens - head.rest if head.block_bytes else 0
        self._worker.import_(self._sequence_id, head.num_tokens - start, data, start)
        self.num_tokens = head.num_tokens
        return True

    def _length(self) -> int:
        """Return the number of tokens that the loaded sequence has in the cache, valid or not."""
        try:
            return self._worker.sequence_length(self._sequence_id)
        except KeyError:
            return 0

    def _num_cached(self) -> int:
        """Return how many of the next pieces are in the page cache, at most as many as are read at once."""
        end = min(self._next + self._most, self._num_pieces)
        return next((n for n in range(self._next, end) if not self._reader.is_cached(n)), end) - self._next

    def _fetch(self, deadline: float) -> int:
        """Let the disk's thread read the next pieces into the page cache; return 1 once the first piece is there."""
        first = self._num_fetched - len(self._pending)
        self._num_fetched = max(self._num_fetched, self._next)
        # Number of pieces that the disk's thread reads in advance
        read_ahead = 4
        while self._num_fetched < min(self._next + read_ahead, self._num_pieces):
            self._pending.append(self._threads.submit(self._reader.fetch, self._num_fetched))
            self._num_fetched += 1
        while self._pending and first <= self._next:
            self._come(deadline)
            first += 1
        return 1

    def close(self) -> None:
        self._settle()
        if self._end:
            wait([self._end])
        self._reader.close()
