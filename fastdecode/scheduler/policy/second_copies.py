"""The policy for second copies (``kv_replicas``): which copy is made next, and what time this may take."""

from __future__ import annotations

import numpy as np

from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.places.speeds import Observed
from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.policy.move_prices import TransferPrice
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.holdings import Transfer
from fastdecode.scheduler.store.operations import (
    CopyNext,
    CopySegment,
    Decision,
    DropTransfer,
    GiveUpCopy,
    GrowTransfer,
    Refresh,
)
from fastdecode.scheduler.store.store import Store

SHARE = 0.1
"""Fraction of the steps' time for making second copies; decodes wait while a copy is made."""

MOST_BLOCKS = 1 << 20
"""Most blocks that are copied at once."""


class SecondCopies:
    """Keeps a second copy of each sequence.
    If an R-worker is lost, the sequence continues from the other copy. In each step, either copy can be attended. A
    prompt is stored on two R-workers while it is computed, unless it continues from a prefix with one copy, or has
    several segments and too few blocks are free. A missing second copy is made between steps, one after another, in
    pieces that take a small fraction of a step's time.
    """

    def __init__(self, store: Store, admission: Admission, price: TransferPrice) -> None:
        self._store, self._residents, self._table = store, store.residents, store.table
        self._admission = admission
        self._workers = store.workers
        self._price = price
        self._credit = self._step_seconds = 0.0
        self._joined: list[int] = []
        self._has_lost = False

    def lost(self) -> None:
        """Make no copies before the next step has run, since an R-worker was lost.
        That step first gives the sequences that lost tokens their next token.
        """
        self._has_lost = True

    def observe(self, observed: Observed) -> None:
        """Learn how long a step takes: copies may take a fraction of that time."""
        if self._has_lost:
            self._credit, self._has_lost = min(self._credit, 0.0), False
            return
        self._step_seconds = observed.s_seconds + observed.wait_seconds
        self._credit = min(self._credit, 0.0) + SHARE * self._step_seconds

    def made(self, seconds: float) -> None:
        """Record that copying a piece took ``seconds``."""
        self._credit -= seconds

    def joined(self, worker: int) -> None:
        """Let the new R-worker ``worker``, which holds no copies, take over some."""
        self._joined.append(worker)

    def leave_draining(self) -> Decision[None]:
        """Drop second copies on draining R-workers, and unfinished copies to them.
        If a segment is only on a draining R-worker, an unfinished second copy of it is dropped too: the segment must
        move.
        """
        for worker in self._workers.draining:
            yield from self._give_up_making(worker)
            for sequence in self._residents.on(worker):
                for segment in sequence.segments if not sequence.job_id else ():
                    if segment.on(worker) and segment.twice:
                        yield GiveUpCopy(sequence, segment, worker)
            for transfer in [each for each in self._store.transfers if each.segment.workers == [worker]]:
                yield DropTransfer(transfer)  # the segment's only copy will move instead

    def give_up(self, worker: int) -> Decision[bool]:
        """Free blocks on ``worker``: drop an unfinished copy to it, or else one of two copies of a segment.
        Return False if there is neither.
        """
        return (yield from self._give_up_making(worker)) or (yield from self._give_up_spare(worker))

    def _give_up_making(self, worker: int) -> Decision[bool]:
        made = next((each for each in self._store.transfers if each.target == worker), None)
        if made:
            yield DropTransfer(made)
        return made is not None

    def _give_up_spare(self, worker: int) -> Decision[bool]:
        """Drop a copy on ``worker`` whose segment has a second copy, of the youngest sequence with several segments.
        Return False if there is none. Sequences of one segment keep both copies, since either is enough to continue.
        """
        for sequence in sorted(self._table.several(), key=lambda each: -each.sequence_id):
            for segment in reversed(sequence.segments):
                if segment.on(worker) and segment.twice:
                    yield GiveUpCopy(sequence, segment, worker)
                    return True
        return False

    def next(self) -> Decision[Transfer | None]:
        """Return a transfer with the next piece of a second copy; None if no copy is missing, or no time is left."""
        if self._credit <= 0:
            return None
        if not len(self._store.transfers):
            yield Refresh()
            if found := self._lacking() or self._evening():
                yield CopySegment(*found)
        transfer = next(iter(self._store.transfers), None)
        if transfer is None:
            return None
        if not (yield from self._grow(transfer)):
            yield DropTransfer(transfer)
            return None
        yield CopyNext(transfer, min(transfer.segment.num_tokens - transfer.num_copied, self._piece_tokens()))
        return transfer

    def _grow(self, transfer: Transfer) -> Decision[bool]:
        """Reserve blocks for tokens that were appended since ``transfer`` began; return False if none are free."""
        worker, more = self._workers[transfer.target], transfer.segment.num_blocks - transfer.num_blocks
        if more > 0 and (worker.available < more + worker.num_sequences or worker.is_draining):
            return False
        yield GrowTransfer(transfer, more)
        return True

    def _piece_tokens(self) -> int:
        """Return how many tokens, in whole blocks, can be copied in the time that copies may take per step."""
        # Least seconds for a piece of a copy, since each piece has fixed costs
        least_seconds = 0.01
        seconds, block_size = max(SHARE * self._step_seconds, least_seconds), self._workers.block_size
        num_blocks = seconds / max(self._price.per_token * block_size, 1e-9)
        return max(1, int(min(num_blocks, MOST_BLOCKS))) * block_size

    def _lacking(self) -> tuple[TokenSequence, Segment, int] | None:
        """Return a missing second copy: (sequence, segment with one copy, R-worker for the second); None if impossible.
        The sequence is the oldest decoding one for which blocks are free.
        """
        rows = self._table.rows
        ids = self._table.chunks["sequence_id"][rows[self._table.second_workers[rows] < 0]].tolist()
        ids += [each.sequence_id for each in self._table.several() if each.sequence_id in self._residents.decoding]
        # Most sequences that are tried between two steps; there may be thousands, and no free block for any
        most_tried = 4
        for sequence_id in sorted(set(ids))[:most_tried]:
            sequence = self._residents.decoding[sequence_id]
            for segment in sequence.segments:
                target = -1
                if segment.num_tokens and not segment.twice:
                    target = self._admission.second_places.later(sequence, segment)
                if target >= 0:
                    return sequence, segment, target
        return None

    def _evening(self) -> tuple[TokenSequence, Segment, int, int] | None:
        """Return a copy for an R-worker that joined: (sequence, segment, this R-worker, R-worker that drops a copy).
        Return None once the new R-worker holds as much as the others.
        """
        while self._joined:
            if found := self._for_newcomer(self._joined[0]):
                return found
            self._joined.pop(0)
        return None

    def _for_newcomer(self, target: int) -> tuple[TokenSequence, Segment, int, int] | None:
        """Return a copy that the new R-worker ``target`` takes over from the R-worker that holds most, or None.
        The sequence keeps its other copy. The result has the form of ``_evening``.
        """
        table, accepting = self._table, self._workers.accepting
        if target not in accepting:
            return None
        held = table.count_held(table.rows, table.num_cached[table.rows], len(self._workers))
        times = held / np.maximum(self._workers.speeds.lasting, 1e-300)
        # A new R-worker takes over copies until it holds this fraction of the mean, relative to its speed
        uneven_holders = 0.9
        if times[target] >= uneven_holders * times[accepting].mean():
            return None
        source = max(accepting, key=lambda worker: times[worker])
        for sequence in self._residents.on(source):
            decodes = sequence.sequence_id in self._residents.decoding
            may_go = decodes and len(sequence.holders) == 2 and target not in sequence.holders
            if may_go and self._admission.room.to_go_on(sequence, sequence.tail.num_blocks + 1, target):
                return sequence, sequence.tail, target, source
        return None
