"""The store's counts of blocks against what sequences and prefixes hold, through all changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.scheduler_harness import AMPLE

from fastdecode.core.placing import Placing
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.scheduler import SCHEDULES, Scheduler, Sequence
from fastdecode.scheduler.places.speeds import Observed, Speeds
from fastdecode.scheduler.policy.move_prices import MovePrices, TransferPrice

BLOCK, NUM_BLOCKS = 4, 10


def with_two_copies() -> tuple[Scheduler, Sequence, int]:
    """Return a decoding sequence of two full blocks on two of three R-workers, and the third R-worker."""
    limits = replace(
        AMPLE, block_size=BLOCK, num_blocks=(NUM_BLOCKS,) * 3, bandwidths=(1.0,) * 3, placing=Placing(copies=2),
        max_model_len=BLOCK * NUM_BLOCKS,
    )  # fmt: skip
    scheduler, sequence = Scheduler(SCHEDULES["stall-free"], limits), Sequence(0, [1] * (2 * BLOCK), 5)
    scheduler.add(sequence)
    scheduler.commit(scheduler.schedule())
    sequence.append(2)
    (third,) = {0, 1, 2} - set(sequence.holders)
    return scheduler, sequence, third


@pytest.mark.parametrize("loses_source", [False, True])
def test_a_moved_copy_leaves_the_other_ones_blocks_as_they_are(loses_source: bool) -> None:
    """A move takes a block for the next token along, which the copy that stays does not have yet.

    If the source's copy is lost meanwhile, the move makes a second copy.
    """
    scheduler, sequence, third = with_two_copies()
    store = scheduler.store
    transfer = store.transfers.begin_move(sequence, sequence.tail, third, 3)
    transfer.num_tokens = 2 * BLOCK
    if loses_source:
        store.give_up(sequence, sequence.tail, transfer.source)
    assert store.transfers.advance(transfer)
    assert third in sequence.holders and len(sequence.holders) == 2 and transfer.source in range(3)
    held = {worker.index: NUM_BLOCKS - worker.free for worker in store.workers}
    assert held == {0: 0, 1: 0, 2: 0} | dict.fromkeys(sequence.holders, 2)
    scheduler.commit(scheduler.schedule())
    scheduler.finish(sequence)
    assert [worker.free for worker in store.workers] == [NUM_BLOCKS] * 3


def test_a_transfer_whose_last_source_goes_is_dropped_as_it_was() -> None:
    scheduler, sequence, third = with_two_copies()
    store = scheduler.store
    transfer = store.transfers.begin_move(sequence, sequence.tail, third, 3)
    source = transfer.source
    for worker in sequence.holders:
        store.give_up(sequence, sequence.tail, worker)
    assert not len(store.transfers) and transfer.source in (source, 1 - source)
    assert [worker.free for worker in store.workers] == [NUM_BLOCKS] * 3


def test_what_moves_took_does_not_let_corrections_in_where_none_are_wanted() -> None:
    """With two copies the choice of who attends evens the load, but draining sequences move all the same."""
    chunks = [Chunk(0, 0, 8999, [1]), Chunk(1, 1, 999, [1])]
    uneven = Observed(ScheduledStep((MiniBatch.of(chunks),), ((), ())), 0.0, 0.1, (0.1, 0.01))
    for corrects in (False, True):
        price = TransferPrice(1e-6)
        prices = MovePrices(price, Speeds([1.0, 1.0]), corrects)
        for _ in range(50):
            prices.observe(uneven)
        price.paid(1000, 1e-3)
        assert prices.may_pay == corrects
