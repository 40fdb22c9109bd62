"""Caches that go from one R-worker to another between two steps: one queue of moves and second copies."""

from __future__ import annotations

import math

from fastdecode.scheduler.places.speeds import Observer
from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.policy.move_prices import TransferPrice
from fastdecode.scheduler.policy.moves import Moves
from fastdecode.scheduler.policy.second_copies import SecondCopies
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.store.holdings import Transfer
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.waiting import Lifecycle


class Transfers:
    """One queue: what must leave R-workers that drain, what newcomers get, corrections of an uneven load, and missing
    second copies. Each transfer has its target's blocks from the moment it is chosen."""

    def __init__(self, store: Store, admission: Admission, limits: Limits, lifecycle: Lifecycle) -> None:
        """With two copies of each sequence, who attends evens the load instead of moves."""
        self._store, self._lifecycle, has_two = store, lifecycle, limits.placing.twice
        self._price = TransferPrice(limits.seconds_per_moved_token)
        corrects = math.isfinite(limits.seconds_per_moved_token) and not has_two
        self.moves = Moves(store, admission, self._price, corrects)
        self.copies = SecondCopies(store, admission, self._price) if has_two else None

    def next(self) -> Transfer | None:
        """Return what to copy next, if anything, between two steps and once the R-workers have heard their controls;
        then comes :meth:`done`, or the next is asked for.

        R-workers that drain keep nothing that others hold too; sequences that must leave one, but for which no other
        has room, are preempted.
        """
        for transfer in [each for each in self._store.transfers if each.is_move]:
            self._store.transfers.drop(transfer)  # it was never carried out
        if self.copies:
            self._lifecycle.carry_out(self.copies.leave_draining())
        for sequence in self.moves.homeless():
            self._lifecycle.preempt(sequence)
        carry_out = self._lifecycle.carry_out
        return carry_out(self.moves.next()) or (carry_out(self.copies.next()) if self.copies else None)

    def stands(self, transfer: Transfer) -> bool:
        """False if its sequence or one of its R-workers has gone since it was chosen: there is nothing to copy."""
        return transfer in self._store.transfers

    def done(self, transfer: Transfer, seconds: float) -> None:
        """The bytes were copied in ``seconds``, during which no step ran; a copy that is to go is released with the
        next step."""
        self._price.paid(transfer.num_tokens, seconds)
        if transfer.is_move or self.copies is None:
            self.moves.moved(transfer, seconds)
        else:
            self.copies.made(seconds)
        self._store.transfers.advance(transfer)

    def joined(self, worker: int) -> None:
        """R-worker ``worker`` is to get its part."""
        (self.copies.joined if self.copies else self.moves.even_out)(worker)

    def lost(self) -> None:
        """An R-worker is gone."""
        if self.copies:
            self.copies.lost()

    @property
    def observers(self) -> list[Observer]:
        """What learns from how long steps take: prices of moves, and how much time second copies may take."""
        return [self.moves.prices, self.copies] if self.copies else [self.moves.prices]
