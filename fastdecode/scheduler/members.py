"""R-workers that join, drain and are lost, and what this means for their sequences."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.losses import Losses
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.transfers import Transfers
from fastdecode.scheduler.waiting import Lifecycle, WaitingQueue


class Members:
    """Adapts running and waiting sequences when R-workers join, drain or are lost."""

    def __init__(
        self, store: Store, queue: WaitingQueue, admission: Admission, transfers: Transfers, lifecycle: Lifecycle
    ) -> None:
        self._store, self._workers, self._residents = store, store.workers, store.residents
        self._queue, self._admission, self._room = queue, admission, admission.room
        self._transfers, self._lifecycle = transfers, lifecycle
        self._losses = Losses(store)

    def join(self, num_blocks: int, bandwidth: float, index: int | None = None, host: str = "") -> None:
        """Add an R-worker with ``num_blocks`` blocks, as the next index or at a vacant ``index``.
        Sequences move there while it is less loaded than other R-workers.
        """
        index = len(self._workers) if index is None else index
        self._admission.load_limit.join(index, self._workers.join(index, num_blocks, bandwidth, host))
        self._transfers.joined(index)

    def drain(self, worker: int) -> None:
        """Start draining R-worker ``worker``: its sequences move away.
        A sequence starts there only if no other R-worker could hold it.
        """
        self._workers.drain(worker)

    def drained(self) -> list[int]:
        """Return the draining R-workers that can leave: they hold no sequence, and every sequence fits elsewhere.
        The result is empty while no other R-worker accepts sequences.
        """
        growing = [each for each in self._residents.all if self._room.may_split(each)]
        return [
            worker
            for worker in self._workers.draining
            if self._workers.accepting
            and self._workers[worker].holds_nothing
            and all(map(self._room.fits_elsewhere, [*self._queue.all, *growing]))
        ]

    def spoilt(self, workers: Sequence[int]) -> list[int]:
        """Return the ids of the sequences that lost cached tokens with the lost R-workers ``workers``.
        Discard the tokens that the last step sampled for these sequences: wrong attention results may have changed
        them.
        """
        return self._losses.spoilt(workers)

    def lost(self, worker: int) -> list[TokenSequence]:
        """Handle the loss of R-worker ``worker``; return the waiting sequences that no other R-worker could ever hold.
        A sequence with a second copy continues from that copy. If a sequence has several segments, only the lost ones
        are recomputed, at once if enough blocks are free. All other sequences are queued by age, to be recomputed. The
        returned sequences are dropped.
        """
        self._transfers.lost()
        whole, broken, starved = self._losses.lose(worker)
        for sequence in whole:
            self._lifecycle.begin_again(sequence)
        self._admission.load_limit.lose(worker)
        for sequence in starved:
            self._lifecycle.preempt(sequence)
        for sequence in broken:
            self._mend(sequence)
        for sequence in self._residents.all:
            if self._room.may_split(sequence) and not self._room.fits_somewhere(sequence):
                self._lifecycle.preempt(sequence)
        hopeless = [sequence for sequence in self._queue.all if not self._room.fits_somewhere(sequence)]
        for sequence in hopeless:
            self._lifecycle.discard(sequence)
        return hopeless

    def doubt(self) -> list[int]:
        """Queue all running sequences to be recomputed, and forget all prefixes; return the ids of these sequences.
        An R-worker was found at fault, and their cached tokens may depend on its results.
        """
        doubtful = list(self._residents.all)
        for sequence in doubtful:
            self._lifecycle.preempt(sequence, keep=False)
        self._store.prefixes.doubt()
        return [sequence.sequence_id for sequence in doubtful]

    def _mend(self, sequence: TokenSequence) -> None:
        """Recompute the lost segments of ``sequence``; if they find no place now, queue the whole sequence."""
        self._queue.release_followers(sequence)
        self._store.table.refresh()
        places = self._admission.segments.again(sequence) if self._room.fits_somewhere(sequence) else None
        if places is None:
            self._lifecycle.preempt(sequence)
            return
        self._store.place_again(sequence, places)
        if not sequence.in_prompt:
            self._lifecycle.finish_prompt(sequence)
