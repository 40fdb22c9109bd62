"""Which R-worker a new sequence goes to, counted in blocks with the R-workers' own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.scheduler.sequence import Sequence


@dataclass
class Reservation:
    """Blocks held for one prompt and the sequences that grow from it: the shared ones go with the last of them."""

    worker: int
    shared_blocks: int
    own_blocks: int
    num_holders: int


class Placement:
    """Free blocks per R-worker. A sequence of t tokens holds ceil(t / block_size) blocks, whole shared ones counted
    once per prompt."""

    def __init__(self, num_blocks: list[int], block_size: int) -> None:
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.blocks_free = list(num_blocks)
        self._held: dict[int, Reservation] = {}

    def blocks_for(self, sequence: Sequence) -> int:
        """Blocks that ``sequence`` and its siblings can need at most."""
        shared, own = self._split(sequence)
        return shared + own * (1 + len(sequence.siblings))

    def reserve(self, sequence: Sequence) -> bool:
        """Place ``sequence`` on the emptiest worker and reserve all it can need; False when none has room."""
        shared, own = self._split(sequence)
        worker = max(range(len(self.blocks_free)), key=self.blocks_free.__getitem__)
        members = (sequence, *sequence.siblings)
        if self.blocks_free[worker] < shared + own * len(members):
            return False
        self.blocks_free[worker] -= shared + own * len(members)
        reservation = Reservation(worker, shared, own, len(members))
        for member in members:
            member.worker = worker
            self._held[member.sequence_id] = reservation
        return True

    def release(self, sequence: Sequence) -> None:
        """Give back what was reserved for one sequence."""
        reservation = self._held.pop(sequence.sequence_id)
        reservation.num_holders -= 1
        self.blocks_free[reservation.worker] += reservation.own_blocks
        if reservation.num_holders == 0:
            self.blocks_free[reservation.worker] += reservation.shared_blocks

    def _split(self, sequence: Sequence) -> tuple[int, int]:
        """Whole prompt blocks that siblings share, and the blocks each sequence needs beside them."""
        shared = len(sequence.prompt_token_ids) // self.block_size
        return shared, -(-sequence.max_cached // self.block_size) - shared
