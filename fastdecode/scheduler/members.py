"""R-workers that join, drain and are lost, and what becomes of the sequences on them."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.losses import Losses
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.transfers import Transfers
from fastdecode.scheduler.waiting import Lifecycle, WaitingQueue


class Members:
    """Keeps what runs and waits in step with the R-workers that are there."""

    def __init__(
        self, store: Store, queue: WaitingQueue, admission: Admission, transfers: Transfers, lifecycle: Lifecycle
    ) -> None:
        self._store, self._workers, self._residents = store, store.workers, store.residents
        self._queue, self._admission, self._room = queue, admission, admission.room
        self._transfers, self._lifecycle = transfers, lifecycle
        self._losses = Losses(store)

    def join(self, num_blocks: int, bandwidth: float, index: int | None = None, host: str = "") -> None:
        """One more R-worker, next in number or in a vacant place ``index``; as long as it is less loaded than others,
        sequences move to it."""
        index = len(self._workers) if index is None else index
        self._admission.load_limit.join(index, self._workers.join(index, num_blocks, bandwidth, host))
        self._transfers.joined(index)

    def drain(self, worker: int) -> None:
        """R-worker ``worker`` is to go: nothing starts there that could run elsewhere, and what is there moves away."""
        self._workers.drain(worker)

    def drained(self) -> list[int]:
        """Return R-workers that were to go, hold no sequence any more, and are not waited for: never the last."""
        growing = [each for each in self._residents.all if self._room.may_split(each)]
        return [
            worker
            for worker in self._workers.draining
            if self._workers.accepting
            and self._workers[worker].holds_nothing
            and all(map(self._room.fits_elsewhere, [*self._queue.all, *growing]))
        ]

    def spoilt(self, workers: Sequence[int]) -> list[int]:
        """Return the sequences that lost something with R-workers ``workers``, which are gone.

        Discard their tokens of the last step: they attended there, or have to be computed again.
        """
        return self._losses.spoilt(workers)

    def lost(self, worker: int) -> list[TokenSequence]:
        """R-worker ``worker`` is gone: sequences with a second copy go on from that; what else it held is queued to be
        computed again on the others, by age. Of sequences with several ranges only those that were lost are computed
        again, at once, if there is room for them.

        Returns the waiting sequences that none of the others could hold; they are forgotten.
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

    def _mend(self, sequence: TokenSequence) -> None:
        """Compute the lost ranges of ``sequence`` again, or all of it where there is no room for them now."""
        self._queue.release_followers(sequence)
        self._store.table.refresh()
        places = self._admission.segments.again(sequence) if self._room.fits_somewhere(sequence) else None
        if places is None:
            self._lifecycle.preempt(sequence)
            return
        self._store.place_again(sequence, places)
        if not sequence.in_prompt:
            self._lifecycle.finish_prompt(sequence)
