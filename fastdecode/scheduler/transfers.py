"""Copies between R-workers, made between two steps: one queue for moves and for second copies."""

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
    """One queue of transfers: away from draining R-workers, to new ones, for balance, and for missing second copies.

    When a transfer is chosen, the target's blocks are reserved at once.
    """

    def __init__(self, store: Store, admission: Admission, limits: Limits, lifecycle: Lifecycle) -> None:
        """With two copies of each sequence in ``limits``, nothing moves for balance: either copy can attend."""
        self._store, self._lifecycle, has_two = store, lifecycle, limits.placing.twice
        self._price = TransferPrice(limits.seconds_per_moved_token)
        corrects = math.isfinite(limits.seconds_per_moved_token) and not has_two
        self.moves = Moves(store, admission, self._price, corrects)
        self.copies = SecondCopies(store, admission, self._price) if has_two else None

    def begin_next(self) -> Transfer | None:
        """Choose what to copy next, reserve its blocks and return the transfer; None for nothing.
        Call this between two steps, after the R-workers have received their controls. After each transfer call
        :meth:`done`, or this method again. Draining R-workers drop copies if another R-worker has one too. Sequences
        that must leave a draining R-worker, but find no free blocks, are preempted.
        """
        for transfer in [each for each in self._store.transfers if each.is_move]:
            # a move takes one piece, so a move that is still listed was not carried out
            self._store.transfers.drop(transfer)
        if self.copies:
            self._lifecycle.carry_out(self.copies.leave_draining())
        for sequence in self.moves.homeless():
            self._lifecycle.preempt(sequence)
        carry_out = self._lifecycle.carry_out
        return carry_out(self.moves.next()) or (carry_out(self.copies.next()) if self.copies else None)

    def stands(self, transfer: Transfer) -> bool:
        """Return False if the sequence or an R-worker of ``transfer`` has gone since the transfer was chosen."""
        return transfer in self._store.transfers

    def done(self, transfer: Transfer, seconds: float) -> None:
        """Record that the bytes of ``transfer`` were copied in ``seconds``, while no step ran.
        After a move, the next step frees the blocks on the source R-worker.
        """
        self._price.paid(transfer.num_tokens, seconds)
        if transfer.is_move or self.copies is None:
            self.moves.moved(transfer, seconds)
        else:
            self.copies.made(seconds)
        self._store.transfers.advance(transfer)

    def joined(self, worker: int) -> None:
        """From now on, move sequences or second copies to the new R-worker ``worker`` between steps."""
        (self.copies.joined if self.copies else self.moves.even_out)(worker)

    def lost(self) -> None:
        """Record that an R-worker was lost, so that second copies wait until the next step has run."""
        if self.copies:
            self.copies.lost()

    @property
    def observers(self) -> list[Observer]:
        """The parts that learn from the duration of steps: prices of moves, and the time for second copies."""
        return [self.moves.prices, self.copies] if self.copies else [self.moves.prices]
