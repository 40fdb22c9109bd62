"""The sequences with a cache: which compute a prompt or decode, use scratch, and append to which segments."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.core.types import Handover
from fastdecode.scheduler.names import CacheIds, Names
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.holdings import Holdings
from fastdecode.scheduler.store.table import SequenceTable


class Residents:
    """The sequences with a cache on R-workers.
    ``prompts``: sequences whose prompt is being computed, in the order of their start. ``decoding``: all others.
    ``table``: the progress of all. ``scratch_free``: prompt tokens that still fit the S-worker's scratch.
    ``left_scratch``: ids of sequences that gave up their scratch before their prompt was computed.
    """

    def __init__(self, table: SequenceTable, scratch_tokens: int) -> None:
        self.table = table
        self.scratch_free = scratch_tokens
        self.prompts: dict[int, TokenSequence] = {}
        self.decoding: dict[int, TokenSequence] = {}
        self.left_scratch: list[int] = []
        self._unborn = 0

    def __len__(self) -> int:
        """Return the number of sequences with a cache, and of siblings that get one after their prompt."""
        return len(self.prompts) + len(self.decoding) + self._unborn

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence.sequence_id in self.prompts or sequence.sequence_id in self.decoding

    @property
    def all(self) -> list[TokenSequence]:
        return [*self.prompts.values(), *self.decoding.values()]

    @property
    def num_twice(self) -> int:
        """The number of sequences with two copies of every segment."""
        tails = int(np.count_nonzero(self.table.second_workers >= 0))
        return tails - sum(it.tail.twice and not all(each.twice for each in it.segments) for it in self.table.several())

    def on(self, worker: int) -> list[TokenSequence]:
        """Return the sequences with a segment on R-worker ``worker``, oldest first."""
        return sorted(self.table.on(worker), key=lambda sequence: sequence.sequence_id)

    def prompt_loads(self, num_workers: int) -> np.ndarray:
        """Return the KV tokens that each R-worker will attend for prompts in progress: int64 [num_workers]."""
        loads = np.zeros(num_workers, np.int64)
        for prompt in self.prompts.values():
            for each in prompt.segments if prompt.attends_in_prompt else ():
                loads[each.home] += min(self.table.segment_tokens, prompt.num_prefill - each.start)
        return loads

    def next_rows(self, sequence: TokenSequence, most: int) -> Chunk:
        """Return the next chunk of the prompt of ``sequence``: at most ``most`` tokens, all in one segment.

        The first copies of its segments attend.
        """
        tail, start, closed = sequence.tail, sequence.num_cached, []
        count = min(most, self.table.segment_tokens - tail.num_tokens)
        # Most partial results of a prompt chunk: its rows times the segments that they attend to. One takes some 17 kB
        # for 32 heads of 128, as float32, and an R-worker accepts at most 256 MiB of them per layer.
        most_partial_results = 2048
        if sequence.num_closed and sequence.attends_in_prompt:
            count = min(count, max(1, most_partial_results // (1 + sequence.num_closed)))
            closed = sequence.closed
        last = start + count == sequence.num_prefill
        return Chunk(
            sequence.sequence_id,
            tail.home,
            start,
            sequence.tokens(start, count),
            attends=sequence.attends_in_prompt,
            samples=last and sequence.num_prefill == sequence.num_tokens,
            last_of_prompt=last,
            is_decode=False,
            scored=sequence.scored,
            base=tail.start,
            cache_id=tail.cache_id,
            reads=tuple((each.home, each.cache_id, each.start) for each in closed),
            copy=next(iter(tail.workers[1:]), -1),
        )

    def enter(self, sequence: TokenSequence, may_use_scratch: bool) -> None:
        """Add ``sequence`` as a prompt. It uses scratch if ``may_use_scratch`` and if the prompt fits there."""
        self.prompts[sequence.sequence_id] = sequence
        self._unborn += len(sequence.siblings)
        sequence.uses_scratch = may_use_scratch and sequence.num_prefill <= self.scratch_free
        if sequence.uses_scratch:
            self.scratch_free -= sequence.num_prefill

    def decode(self, sequence: TokenSequence) -> None:
        """Record that the prompt of ``sequence`` is cached, so that it decodes."""
        if self.prompts.pop(sequence.sequence_id, None):
            self.leave_scratch(sequence)
        self.decoding[sequence.sequence_id] = sequence
        self.table.decode(sequence)

    def fork(self, parent: TokenSequence) -> None:
        """Record that the siblings of ``parent``, which have table rows, decode."""
        self._unborn -= len(parent.siblings)
        for sibling in parent.siblings:
            self.decode(sibling)

    def compute_again(self, sequence: TokenSequence) -> None:
        """Treat ``sequence`` as a prompt again, without scratch, whether it decoded or not."""
        if self.decoding.pop(sequence.sequence_id, None):
            self.table.stop(sequence)
        self._give_up_scratch(sequence)
        self.prompts[sequence.sequence_id] = sequence

    def forget_unused(self, sequence: TokenSequence) -> None:
        """Forget cached tokens after the end of ``sequence``: they are drafts that were accepted beyond its end."""
        self.table.num_cached[sequence.row] = min(sequence.num_cached, sequence.num_tokens)

    def leave(self, sequence: TokenSequence) -> bool:
        """Remove ``sequence``; return whether its prompt was being computed."""
        self._unborn -= len(sequence.siblings)
        if self.prompts.pop(sequence.sequence_id, None):
            self._give_up_scratch(sequence)
            return True
        del self.decoding[sequence.sequence_id]
        return False

    def _give_up_scratch(self, sequence: TokenSequence) -> None:
        if sequence.uses_scratch:
            self.left_scratch.append(sequence.sequence_id)
        self.leave_scratch(sequence)

    def leave_scratch(self, sequence: TokenSequence) -> None:
        """Free the scratch that ``sequence`` uses, if any."""
        if sequence.uses_scratch:
            sequence.uses_scratch = False
            self.scratch_free += sequence.num_prefill


class Tails:
    """Counts the tokens and blocks that sequences append, and how many sequences append on each R-worker."""

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
        """Let ``sequence`` append to its next segment if the present one is full."""
        while sequence.ahead and sequence.tail.num_tokens == self._table.segment_tokens:
            self.set_tail(sequence, sequence.num_closed + 1)

    def set_tail(self, sequence: TokenSequence, num_closed: int) -> None:
        """Let ``sequence`` append to the segment after its first ``num_closed`` segments."""
        self.count(sequence, -1)
        sequence.num_closed = num_closed
        self._table.put(sequence)
        self.count(sequence, 1)

    def extend(self, sequence: TokenSequence, worker: int) -> None:
        """Give ``sequence``, whose last segment is full, a new one on ``worker``, with no blocks for tokens yet."""
        segment = Segment(self._ids.new(), sequence.num_cached, self._workers.blocks_for(0), [worker])
        self._holdings.take(segment, segment.copies[0])
        sequence.segments.append(segment)
        self._names.segments(sequence, [segment])
        self.go_on(sequence)

    def grow(self, rows: np.ndarray, num_blocks: np.ndarray | int = 1) -> None:
        """Reserve ``num_blocks`` more blocks for the sequence of each of the table ``rows``.
        A negative number frees blocks.
        """
        self._table.num_blocks[rows] += num_blocks
        for worker, count in enumerate(self._table.count_held(rows, num_blocks, len(self._workers)).tolist()):
            self._workers[worker].grow(count)

    def truncate(self, sequence: TokenSequence) -> None:
        """Queue a TRUNCATE for a decoding ``sequence``: R-workers hold more of its tokens than count as cached."""
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

    def handovers(self, mini_batches: Iterable[MiniBatch]) -> tuple[Handover, ...]:
        """Return the recurrent states to copy before a step: one for each copy of a later segment that begins in it.
        Each segment keeps the state after its last token, so that the next segment may lie on any R-worker.
        """
        begun = [] if self._workers.sizes.rewinds else [each for each in self._table.several() if each.begins_tail]
        if not begun:
            return ()
        in_step = {each for mini_batch in mini_batches for each in mini_batch.chunks["sequence_id"].tolist()}
        return tuple(
            Handover(before.home, before.cache_id, before.num_tokens, worker, tail.cache_id, tail.start)
            for before, tail in ((each.closed[-1], each.tail) for each in begun if each.sequence_id in in_step)
            for worker in tail.workers
        )

    def count(self, sequence: TokenSequence, count: int) -> None:
        """Add ``count`` to the number of appending sequences of each R-worker on which ``sequence`` appends."""
        for worker in sequence.tail.workers:
            self._workers[worker].num_sequences += count
